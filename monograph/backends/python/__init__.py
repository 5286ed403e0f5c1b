"""Plans as generated Python: the text of their ops, and of steps that write their state in a second part.

In: a plan, or a schedule. Out: functions, and a `Runner` of them. Imports `distributed/programs`, `elementwise`, `ir`,
`ir/ops`, `plan`, `plan/updates`, `runtime`.
"""
