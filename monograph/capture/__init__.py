"""From the user's `build()` to a program: one run of it is traced on fakes, and what it read becomes guards.

`trace.py` has the order: `step` records, `retraces.py` says when a step is traced again, `ports.py` names the inputs
and outputs, and `captured.py` is what the compiler gets.

In: a graph's step and the arguments of a call. Out: a program, what it is bound to, and its guards.
Imports `capture/accumulation`, `capture/effects`, `capture/effects/python_objects`, `capture/guards`,
`capture/guards/sources`, `capture/numbers`, `capture/optimizers`, `capture/process`, `capture/step`, `capture/tensors`,
`capture/tensors/functional`, `distributed`, `distributed/pipeline`, `ir`, `ir/call`, `ir/ops`, `state`.
"""
