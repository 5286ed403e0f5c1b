"""The state of a graph as one nested dict, and back: all of it is loaded, or nothing is.

In: the inside of a graph. Out: a dict in torch's own formats. Imports `capture/guards`, `capture/guards/sources`,
`capture/optimizers`, `compiler`, `distributed/pipeline`, `internals`, `ir`, `ir/call`, `numerics`, `state`.
"""
