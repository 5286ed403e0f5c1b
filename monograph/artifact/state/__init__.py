"""What moves on the Python side after a step of an artifact: learning rates, averages, counters.

In: schedulers and their state. Out: their next values, without their code. Imports `checkpoint`, `ir`, `ir/call`,
`schedulers`.
"""
