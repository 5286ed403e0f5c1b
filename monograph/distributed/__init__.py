"""Steps that several processes take together: gradients are averaged, buffers are those of the first process.

In: the modules of a graph, wrappers around them, the settings. Out: collectives, recorded or run in eager mode.
Imports `distributed/programs`, `ir`, `ir/call`, `state`.
"""
