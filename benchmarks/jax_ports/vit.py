"""The vision transformer in JAX."""

from __future__ import annotations

import jax.numpy as jnp

from benchmarks.jax_ports.layers import (
    Array,
    Arrays,
    Layout,
    Loss,
    attention,
    cross_entropy,
    gelu,
    layer_norm,
    linear,
)
from benchmarks.workloads.vit import Sizes


def loss(sizes: Sizes, _layout: Layout) -> Loss:
    """The loss of one batch. Patches do not overlap, so their convolution is one matrix product."""
    side, patch = sizes.side // sizes.patch, sizes.patch

    def embedded(params: Arrays, x: Array) -> Array:
        patches = x.reshape(len(x), 3, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5)
        flat = patches.reshape(len(x), side * side, 3 * patch * patch)
        return flat @ params["patches.weight"].reshape(sizes.width, -1).T + params["patches.bias"]

    def mixed(params: Arrays, name: str, x: Array) -> Array:
        batch, length, width = x.shape
        parts = linear(params, f"{name}.query_key_value", x)
        parts = parts.reshape(batch, length, 3, sizes.heads, width // sizes.heads)
        y = attention(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], causal=False)
        return linear(params, f"{name}.output", y.reshape(x.shape))

    def layer(params: Arrays, name: str, x: Array) -> Array:
        x = x + mixed(params, name, layer_norm(params, f"{name}.norm1", x))
        y = gelu(linear(params, f"{name}.wide", layer_norm(params, f"{name}.norm2", x)))
        return x + linear(params, f"{name}.narrow", y)

    def compute(params: Arrays, buffers: Arrays, batch: tuple[Array, ...]) -> tuple[Array, Arrays]:
        x, target = batch
        first = jnp.broadcast_to(params["class_token"], (len(x), 1, sizes.width))
        x = jnp.concatenate([first, embedded(params, x)], axis=1) + params["positions"]
        for number in range(sizes.depth):
            x = layer(params, f"layers.{number}", x)
        logits = linear(params, "head", layer_norm(params, "norm", x[:, 0]))
        return cross_entropy(logits, target), buffers

    return compute
