"""A call of a finished build: inputs are bound, the program runs, state is written, results are rebuilt.

In: a build and the arguments of a call. Out: its results. Imports `compat/inductor`, `compat/inductor/building`,
`compat/inductor/checks`, `ir`, `ir/call`, `state`.
"""
