"""The update of a step as loops in C with the bits of eager's kernels: formulas, their proof, code, and calls.

In: a program whose last ops compute new state element by element. Out: one call that writes it. Imports
`compat/inductor`, `ir`, `plan`.
"""
