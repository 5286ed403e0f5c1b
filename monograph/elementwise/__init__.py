"""The update of a step, and chains of element-wise ops, as loops in C with the bits of eager's kernels.

Formulas, their proof, code, and calls. In: a program whose last ops compute new state element by element, and chains of such ops
anywhere. Out: one call that writes the state, and one for each chain.

Imports `compat/inductor`, `ir`, `native`, `passes/inductor`, `plan`.
"""
