"""Tensors while a step is traced: fakes in place of real ones, values that Python asks for, sparse tensors.

In: the tensors of a graph and of a call. Out: fakes, and functions of torch that record what eager mode does.
Imports `capture/numbers`, `compat/traces`, `distributed`, `ir`, `ir/call`, `ir/ops`, `state`.
"""
