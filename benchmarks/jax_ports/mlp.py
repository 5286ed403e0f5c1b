"""The MLPs in JAX."""

from __future__ import annotations

from benchmarks.jax_ports.layers import Array, Arrays, Layout, Loss, cross_entropy, gelu, layer_norm, linear
from benchmarks.workloads.mlp import Sizes


def loss(sizes: Sizes, _layout: Layout) -> Loss:
    """The loss of one batch."""

    def compute(params: Arrays, buffers: Arrays, batch: tuple[Array, ...]) -> tuple[Array, Arrays]:
        x, target = batch
        for layer in range(sizes.depth):
            x = gelu(layer_norm(params, f"{3 * layer + 1}", linear(params, f"{3 * layer}", x)))
        return cross_entropy(linear(params, f"{3 * sizes.depth}", x), target), buffers

    return compute
