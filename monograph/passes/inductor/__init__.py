"""Passes that only Inductor needs: its formulas for some ops are not eager's, others it does not know.

In: a program. Out: the same step in ops that Inductor compiles with eager's values. Imports `ir`, `ir/ops`, `native`.
"""
