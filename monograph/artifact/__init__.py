"""Artifacts: programs and their state, which run without the code of the model.

In: a graph that was called. Out: files, and an `Artifact` that runs them. Imports `artifact/bounds`,
`artifact/programs`, `artifact/schema`, `artifact/state`, `capture`, `capture/tensors`, `checkpoint`, `checkpoint/ranks`, `checkpoint/steps`,
`compat/inductor`, `compiler`, `graph`, `internals`, `ir`, `ir/call`, `ir/ops`, `passes`, `plan`, `runnable`, `runtime`, `state`,
`state_dict`.
"""
