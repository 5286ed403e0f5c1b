"""The recommendation model in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_ports.layers import Array, Arrays, Layout, Loss, embedding, linear
from benchmarks.workloads.dlrm import Sizes


def loss(sizes: Sizes, _layout: Layout) -> Loss:
    """The loss of one batch."""
    rows, columns = np.tril_indices(sizes.tables + 1, -1)

    def layers(params: Arrays, name: str, x: Array, count: int) -> Array:
        for number in range(count):
            x = linear(params, f"{name}.{2 * number}", x if number == 0 else jax.nn.relu(x))
        return x

    def compute(params: Arrays, buffers: Arrays, batch: tuple[Array, ...]) -> tuple[Array, Arrays]:
        dense, ids, target = batch
        first = jax.nn.relu(layers(params, "bottom", dense, len(sizes.bottom) + 1))
        looked_up = [embedding(params, f"tables.{number}", ids[:, number]) for number in range(sizes.tables)]
        vectors = jnp.stack([first, *looked_up], axis=1)
        products = (vectors @ vectors.swapaxes(1, 2))[:, rows, columns]
        logits = layers(params, "top", jnp.concatenate([first, products], axis=1), len(sizes.top) + 1)[:, 0]
        return (
            jnp.maximum(logits, 0) - logits * target + jnp.log1p(jnp.exp(-jnp.abs(logits)))
        ).mean(), buffers

    return compute
