"""A pipeline: the step of a mini-batch is cut into stages, and each rank runs its own, micro-batch by micro-batch.

In: a captured step over micro-batches, as `capture/accumulation` makes it, and a `Pipeline`. Out: the program of one rank,
by `cut_of(program, pipeline, split=...).for_rank(rank)`, which needs no process group. Imports `distributed`, `ir`, `ir/ops`,
`passes`.
"""
