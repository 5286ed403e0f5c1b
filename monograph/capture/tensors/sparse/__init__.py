"""Ops that meet or make sparse tensors while a step is traced: recorded on the dense parts.

In: an op and its arguments. Out: its result, a fake with known parts, and recorded ops. Imports `capture/numbers`,
`capture/tensors`, `ir/call`.
"""
