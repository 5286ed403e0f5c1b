"""Which forward values are dropped and computed again in backward, so that a step fits into a budget of bytes.

In: a program and a budget. Out: the program with copies of ops in backward, fastest by prediction.
Imports `distributed/programs`, `ir`, `ir/ops`, `kernels`, `passes`, `passes/inductor`, `plan`, `plan/updates`.
"""
