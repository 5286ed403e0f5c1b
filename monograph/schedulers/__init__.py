"""Learning-rate schedulers with OneFlow's names and formulas. They are part of the core because artifacts hold them.

In: an optimizer and the numbers of a formula. Out: a scheduler, which users find in `monograph.flow.optim.lr_scheduler`.
It imports nothing of the package but the ground floor.
"""
