"""ResNet-50 in JAX."""

from __future__ import annotations

import jax

from benchmarks.jax_ports.layers import (
    Array,
    Arrays,
    Layout,
    Loss,
    batch_norm,
    convolution,
    cross_entropy,
    linear,
    max_pool,
)
from benchmarks.workloads.resnet import Sizes


def loss(sizes: Sizes, layout: Layout) -> Loss:
    """The loss of one batch."""

    def conv_norm(params: Arrays, buffers: Arrays, names: tuple[str, str], x: Array, **how: int) -> Array:
        y = convolution(params, names[0], x, layout, **how)
        return batch_norm(params, buffers, names[1], y, layout)

    def bottleneck(params: Arrays, buffers: Arrays, name: str, x: Array, stride: int) -> Array:
        names = [(f"{name}.conv{number}", f"{name}.norm{number}") for number in (1, 2, 3)]
        y = jax.nn.relu(conv_norm(params, buffers, names[0], x))
        y = jax.nn.relu(conv_norm(params, buffers, names[1], y, stride=stride, padding=1))
        y = conv_norm(params, buffers, names[2], y)
        if f"{name}.short.0.weight" in params:
            x = conv_norm(params, buffers, (f"{name}.short.0", f"{name}.short.1"), x, stride=stride)
        return jax.nn.relu(x + y)

    def compute(params: Arrays, buffers: Arrays, batch: tuple[Array, ...]) -> tuple[Array, Arrays]:
        (x, target), buffers = batch, dict(buffers)
        x = jax.nn.relu(conv_norm(params, buffers, ("stem.0", "stem.1"), x, stride=2, padding=3))
        x = max_pool(x, layout, window=3, stride=2, padding=1)
        number = 0
        for stage, depth in enumerate(sizes.depths):
            for place in range(depth):
                stride = 2 if place == 0 and stage > 0 else 1
                x = bottleneck(params, buffers, f"blocks.{number}", x, stride)
                number += 1
        return cross_entropy(linear(params, "head", x.mean(layout.image_axes)), target), buffers

    return compute
