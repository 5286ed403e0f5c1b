"""Learning-rate schedulers with OneFlow's names and formulas. They are part of the core because artifacts hold them.

In: an optimizer and the numbers of a formula. Out: a scheduler, which users find in `monograph.flow.optim.lr_scheduler`.
`ahead.py` is about torch's: they are stepped ahead of a loop of many steps.
It imports nothing of the package but the ground floor.
"""
