"""The workloads in JAX, one module each, with `loss(sizes, layout)`.

They read the parameters and buffers under the names that the PyTorch model gives them. Only the worker of the peer
`jax` imports these modules, so nothing else needs JAX.
"""
