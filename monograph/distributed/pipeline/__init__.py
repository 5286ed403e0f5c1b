"""A pipeline: the step of a mini-batch is cut into stages, and each rank runs its own, micro-batch by micro-batch.

In: a captured step over micro-batches, as `capture/accumulation` makes it, and how it is spread:
`Pipeline(stages, num_ranks, micro_batches, schedule, group)`, where `stages` has the number of a stage by the path of a module.
Out: the program of one rank, by `rank_program(program, pipeline, rank, split=paths)`; for several ranks of one step by
`of_rank(Spread(program, pipeline, paths), rank)`. These are functions of their arguments, and need no process group.
For a step in eager mode `whole_model` gives each process the state of all. Imports
`capture/accumulation`, `capture/tensors`, `distributed`, `ir`, `ir/call`, `ir/ops`, `passes`, `state`.
"""
