"""Passes of backends: for Inductor, whose formulas for some ops are not eager's, and which does not know others; for CPUs.

In: a program. Out: the same step in ops that Inductor compiles with eager's values. Imports `ir`, `ir/ops`, `native`.
"""
