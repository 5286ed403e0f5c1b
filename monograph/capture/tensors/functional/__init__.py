"""From a recorded step that changes tensors in place to a program that does not.

In: a recorded step. Out: the same as pure ops, what it changed as results. Imports `capture/numbers`,
`capture/tensors`, `compat/traces`, `ir`, `ir/call`, `ir/ops`, `state`.
"""
