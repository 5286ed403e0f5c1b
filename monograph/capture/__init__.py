"""From the user's `build()` to a program: one run of it is traced on fakes, and what it read becomes guards.

In: a graph's step and the arguments of a call. Out: a program, what it is bound to, and its guards. Imports
`capture/accumulation`, `capture/effects`, `capture/effects/python_objects`, `capture/guards`, `capture/guards/sources`,
`capture/numbers`, `capture/optimizers`, `capture/process`, `capture/tensors`, `capture/tensors/functional`, `ir`,
`ir/call`, `state`.
"""
