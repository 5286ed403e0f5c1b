"""The state of a graph as one nested dict, and back: all of it is loaded, or nothing is.

In: a graph's state and its builds. Out: a dict in torch's own formats. Imports `capture/guards`,
`capture/guards/sources`, `capture/optimizers`, `compiler`, `ir`, `ir/call`, `numerics`, `state`.
"""
