"""Checkpoints on disk that a crash cannot spoil: safetensors files, and a manifest that names and hashes each.

In: a nested dict of tensors and plain values. Out: the same, verified byte by byte. Imports `ir/call`.
"""
