"""The step under the trace: the user's `build()` and the optimizers run once on fakes.

`traced_step.py` has the order of it: `inputs.py` makes what the step begins with, `replaced_functions.py` looks at each
torch function, `optimizers.py` watches the steps of optimizers, and `results.py` collects what the step gives.

In: a request, with the arguments of one call. Out: the recorded graph, and what the step did besides computing.
Imports `capture/accumulation`, `capture/effects`, `capture/effects/python_objects`, `capture/guards`,
`capture/guards/sources`, `capture/guards/sources/reach`, `capture/numbers`, `capture/optimizers`, `capture/process`,
`capture/tensors`, `capture/tensors/sparse`, `capture/tensors/functional`, `compat/traces`, `distributed`, `distributed/programs`, `ir`, `ir/call`, `state`.
"""
