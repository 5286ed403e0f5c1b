"""Updates in place: which ops lead to new state alone, what can fail before them, when each runs, and many at once.

In: a plan. Out: a `Schedule`, which has a plan of its own. Imports `compat/inductor/checks`, `distributed/programs`, `ir`, `ir/call`, `ir/ops`, `plan`.
"""
