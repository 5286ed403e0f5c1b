"""The recurrent language model in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.jax_ports.layers import Array, Arrays, Layout, Loss, cross_entropy, embedding, linear
from benchmarks.workloads.lstm import Sizes


def loss(sizes: Sizes, _layout: Layout) -> Loss:
    """The loss of one batch. What does not wait for the state is one product over all tokens."""

    def recurrent(params: Arrays, number: int, x: Array) -> Array:
        from_input, from_state = (params[f"lstm.weight_{kind}_l{number}"] for kind in ("ih", "hh"))
        bias = params[f"lstm.bias_ih_l{number}"] + params[f"lstm.bias_hh_l{number}"]
        inputs = (x @ from_input.T + bias).swapaxes(0, 1)
        zeros = jnp.zeros((x.shape[0], sizes.width), x.dtype)

        def step(carry: tuple[Array, Array], gates: Array) -> tuple[tuple[Array, Array], Array]:
            hidden, cell = carry
            into, forget, new, out = jnp.split(gates + hidden @ from_state.T, 4, axis=-1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
            return (hidden, cell), hidden

        _, states = lax.scan(step, (zeros, zeros), inputs)
        return states.swapaxes(0, 1)

    def compute(params: Arrays, buffers: Arrays, batch: tuple[Array, ...]) -> tuple[Array, Arrays]:
        tokens, target = batch
        x = embedding(params, "tokens", tokens)
        for number in range(sizes.depth):
            x = recurrent(params, number, x)
        return cross_entropy(linear(params, "head", x), target), buffers

    return compute
