"""Numbers of Python that move from step to step: learning rates, counters, what is computed from them.

In: floats and ints. Out: symbols that a trace records exactly as Python computes. Imports `capture/guards/sources`,
`compat/traces`, `ir`, `ir/call`, `state`.
"""
