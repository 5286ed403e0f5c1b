"""The benchmarks, which are in the repository and not in the wheel.

`command` is `monograph bench`: whole training steps of PyTorch, JAX and Monograph, timed against each other in turn.
`artifact`, `checkpoint`, `guards`, `own_kernels` and `serve` each measure one part: `python -m benchmarks.guards`.
"""
