"""What a graph owns: parameters, buffers, optimizers and random state are found here, kept, and put back,
and signals are held back meanwhile.

In: modules and optimizers. Out: tensors by path, and snapshots. Imports `ir`, `ir/call`, `renamed`.
"""
