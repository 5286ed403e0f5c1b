"""The competitor that runs JAX. Only the worker of the peer `jax` imports this module."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from torch import Tensor

from benchmarks.competitor import Competitor
from benchmarks.jax_ports.layers import Array, Arrays, Layout
from benchmarks.setting import Setting
from benchmarks.workload import Update, Workload, seeded_batches, seeded_model

WEIGHT_OF_IMAGES = 4  # dimensions


State = tuple[Arrays, Arrays, Any]  # parameters, buffers, what optax keeps


def jax_competitor(workload: Workload, setting: Setting) -> Competitor:
    """Loss, gradients and update as one jitted function that is given its state to overwrite."""
    layout = Layout(setting.channels_last)
    step, held = jax_step(workload, setting)
    jitted = jax.jit(step, donate_argnums=0)

    def step_in_place(*batch: Array) -> Array:
        nonlocal held
        held, value = jitted(held, batch)
        return value

    batches = [tuple(image_array(tensor, layout) for tensor in batch) for batch in seeded_batches(workload)]
    return Competitor(step_in_place, batches, read=float, parameters=lambda: held[0])


def jax_step(
    workload: Workload, setting: Setting
) -> tuple[Callable[[State, Any], tuple[State, Array]], State]:
    """A function from state and batch to new state and loss, and the first state."""
    layout = Layout(setting.channels_last)
    port = importlib.import_module(f"benchmarks.jax_ports.{workload.jax_port}")
    loss = jax.value_and_grad(port.loss(workload.sizes, layout), has_aux=True)
    params, buffers = first_state(workload, layout)
    optimizer = make_optimizer(workload.update, flat=setting.optimizer == "flat")

    def step(held: State, batch: tuple[Array, ...]) -> tuple[State, Array]:
        params, buffers, state = held
        (value, buffers), gradients = loss(params, buffers, batch)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), buffers, state), value

    return step, (params, buffers, optimizer.init(params))


def first_state(workload: Workload, layout: Layout) -> tuple[Arrays, Arrays]:
    """Parameters and buffers of the PyTorch model, under its names."""
    model = seeded_model(workload)
    kept = model.state_dict()
    params = {name: weight_array(tensor, layout) for name, tensor in model.named_parameters()}
    buffers = {name: array(tensor) for name, tensor in model.named_buffers() if name in kept}
    return params, buffers


def make_optimizer(update: Update, *, flat: bool) -> Any:
    """The optimizer of a workload; `flat` updates all parameters as one vector."""
    if update.kind == "adamw":
        made = optax.adamw(update.lr, weight_decay=update.weight_decay)
    else:
        made = optax.chain(
            optax.add_decayed_weights(update.weight_decay), optax.sgd(update.lr, momentum=update.momentum)
        )
    return optax.flatten(made) if flat else made


def array(tensor: Tensor) -> Array:
    """A copy of a tensor."""
    return jnp.array(tensor.detach().numpy())


def image_array(tensor: Tensor, layout: Layout) -> Array:
    """A copy of a tensor; images in the layout of the setting."""
    if layout.channels_last and tensor.dim() == WEIGHT_OF_IMAGES:
        tensor = tensor.permute(0, 2, 3, 1)
    return array(tensor)


def weight_array(tensor: Tensor, layout: Layout) -> Array:
    """A copy of a parameter; weights of convolutions in the layout of the setting."""
    if layout.channels_last and tensor.dim() == WEIGHT_OF_IMAGES:
        tensor = tensor.permute(2, 3, 1, 0)
    return array(tensor)
