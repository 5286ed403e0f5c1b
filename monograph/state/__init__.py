"""What a graph owns: parameters, buffers, optimizers and random state are found here, kept, and put back,
and signals are held back meanwhile. What is Python's own is here too: threads, frames, and the collector of cycles.

In: modules and optimizers. Out: tensors by path, and snapshots. Imports `ir`, `ir/call`, `renamed`.
"""
