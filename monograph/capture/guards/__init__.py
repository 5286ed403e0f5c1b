"""Guards: what a build takes for granted of the world, checked before each call.

In: what the step has read. Out: a check that takes microseconds, and the reason in words where it fails. Imports
`capture/guards/sources`, `capture/tensors`, `capture/tensors/functional`, `ir`, `ir/call`, `state`.
"""
