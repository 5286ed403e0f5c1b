"""What keeps an op of a file without trust in its memory: which ops may be there, and what is checked before each.

In: an op of a file and its arguments. Out: checks, or a refusal. Imports `checkpoint`, `ir`, `ir/ops`, `plan`.
"""
