"""The small GPT in JAX."""

from __future__ import annotations

import jax.numpy as jnp

from benchmarks.jax_ports.layers import (
    Array,
    Arrays,
    Layout,
    Loss,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    linear,
)
from benchmarks.workloads.gpt import Sizes


def loss(sizes: Sizes, _layout: Layout) -> Loss:
    """The loss of one batch. The head is the embedding: one parameter, as in PyTorch."""

    def mixed(params: Arrays, name: str, x: Array) -> Array:
        batch, length, width = x.shape
        heads = (batch, length, sizes.heads, width // sizes.heads)
        parts = jnp.split(linear(params, f"{name}.query_key_value", x), 3, axis=-1)
        query, key, value = (part.reshape(heads) for part in parts)
        y = attention(query, key, value, causal=True)
        return linear(params, f"{name}.output", y.reshape(x.shape))

    def block(params: Arrays, name: str, x: Array) -> Array:
        x = x + mixed(params, f"{name}.attention", layer_norm(params, f"{name}.attention_norm", x))
        y = linear(params, f"{name}.feed_forward.0", layer_norm(params, f"{name}.feed_forward_norm", x))
        return x + linear(params, f"{name}.feed_forward.2", gelu(y))

    def compute(params: Arrays, buffers: Arrays, batch: tuple[Array, ...]) -> tuple[Array, Arrays]:
        tokens, target = batch
        x = embedding(params, "tokens", tokens) + params["positions.weight"][: sizes.length]
        for layer in range(sizes.depth):
            x = block(params, f"blocks.{layer}", x)
        logits = linear(params, "tokens", layer_norm(params, "norm", x))
        return cross_entropy(logits, target), buffers

    return compute
