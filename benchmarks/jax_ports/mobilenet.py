"""MobileNetV2 in JAX."""

from __future__ import annotations

import jax.numpy as jnp

from benchmarks.jax_ports.layers import (
    Array,
    Arrays,
    Layout,
    Loss,
    batch_norm,
    convolution,
    cross_entropy,
    linear,
)
from benchmarks.workloads.mobilenet import Block, Sizes


def loss(sizes: Sizes, layout: Layout) -> Loss:
    """The loss of one batch."""

    def conv_norm_relu6(params: Arrays, buffers: Arrays, name: str, x: Array, **how: int) -> Array:
        y = convolution(params, f"{name}.0", x, layout, **how)
        return jnp.clip(batch_norm(params, buffers, f"{name}.1", y, layout), 0.0, 6.0)

    def block(params: Arrays, buffers: Arrays, name: str, x: Array, of: Block) -> Array:
        y, layer = x, 0
        if of.expansion != 1:
            y, layer = conv_norm_relu6(params, buffers, f"{name}.layers.0", y), 1
        hidden = of.inputs * of.expansion
        how = {"stride": of.stride, "padding": 1, "groups": hidden}
        y = conv_norm_relu6(params, buffers, f"{name}.layers.{layer}", y, **how)
        y = convolution(params, f"{name}.layers.{layer + 1}", y, layout)
        y = batch_norm(params, buffers, f"{name}.layers.{layer + 2}", y, layout)
        return x + y if of.stride == 1 and of.inputs == of.outputs else y

    def compute(params: Arrays, buffers: Arrays, batch: tuple[Array, ...]) -> tuple[Array, Arrays]:
        (x, target), buffers = batch, dict(buffers)
        x = conv_norm_relu6(params, buffers, "features.0", x, stride=sizes.first_stride, padding=1)
        for number, of in enumerate(sizes.blocks, 1):
            x = block(params, buffers, f"features.{number}", x, of)
        x = conv_norm_relu6(params, buffers, f"features.{len(sizes.blocks) + 1}", x)
        logits = linear(params, "classifier.1", x.mean(layout.image_axes))
        return cross_entropy(logits, target), buffers

    return compute
