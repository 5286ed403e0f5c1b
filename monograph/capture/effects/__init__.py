"""What a step changes besides its results: attributes, containers, counters, arguments.

In: the objects that the step has touched. Out: outputs of the program, each with the place that it goes to. Imports
`capture/guards`, `capture/guards/sources`, `capture/numbers`, `capture/tensors`, `ir`, `ir/call`, `state`.
"""
