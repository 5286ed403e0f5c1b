"""memory(): what a step will hold, before it has run: who holds the peak, the curve, and pictures of it.

In: a build. Out: a `MemoryReport`. Imports `backends`, `compiler`, `ir`, `plan`, `recompute`, `runnable`, `runtime`, `state`.
"""
