"""Gradient accumulation: one call is a mini-batch, which runs as several micro-batches.

In: a captured micro-step. Out: two programs, and the step that calls them. Imports `capture/tensors`,
`distributed`, `ir`, `ir/call`, `state`.
"""
