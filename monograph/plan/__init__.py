"""The program made physical: its order, when memory is free, what is written in place; and the proof of it.

In: a program. Out: a `Plan`. Imports `distributed/programs`, `ir`, `ir/call`, `ir/ops`.
"""
