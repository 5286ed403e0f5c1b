"""Optimizers, gradient scalers, autocast and clipping inside of a traced step.

In: the user's optimizers. Out: their update as ops of the program, learning rates as inputs. Imports
`capture/effects`, `capture/guards`, `capture/guards/sources`, `capture/tensors`, `compat/traces`, `ir`, `state`.
"""
