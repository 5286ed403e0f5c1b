"""Programs as JSON, and back. Reading makes values only; nothing of a file is run.

In: a program or its JSON. Out: the other. Imports `artifact/bounds`, `artifact/schema`, `capture/numbers`, `capture/tensors`,
`checkpoint`, `compat/traces`, `ir`, `ir/call`, `ir/ops`.
"""
