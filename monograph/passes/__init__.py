"""Passes: functions from program to program. `table.py` has all of them, in their order; `run.py` runs them.

In: a program. Out: one that does the same, checked and kept as a stage.
Imports `distributed/programs`, `ir`, `ir/ops`, `passes/inductor`.
"""
