"""Layers as functions of a mapping of parameters, with the arithmetic and the epsilons of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any
Arrays = dict[str, Array]
Loss = Callable[[Arrays, Arrays, tuple[Array, ...]], tuple[Array, Arrays]]  # to the loss and the new buffers

EPSILON = 1e-5
NORM_MOMENTUM = 0.1


@dataclass(frozen=True)
class Layout:
    """Where the channels of images are."""

    channels_last: bool

    @property
    def channel_axis(self) -> int:
        """The axis of the channels."""
        return 3 if self.channels_last else 1

    @property
    def image_axes(self) -> tuple[int, int]:
        """The axes of height and width."""
        return (1, 2) if self.channels_last else (2, 3)

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        """Images, weights and results of a convolution as JAX spells them."""
        return ("NHWC", "HWIO", "NHWC") if self.channels_last else ("NCHW", "OIHW", "NCHW")

    def along_channels(self, vector: Array) -> Array:
        """A vector with one entry for each channel, shaped to meet images."""
        return vector if self.channels_last else vector[:, None, None]


def linear(params: Arrays, name: str, x: Array) -> Array:
    """torch.nn.Linear."""
    y = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias


def embedding(params: Arrays, name: str, ids: Array) -> Array:
    """torch.nn.Embedding."""
    return params[f"{name}.weight"].at[ids].get(mode="promise_in_bounds")


def layer_norm(params: Arrays, name: str, x: Array) -> Array:
    """torch.nn.LayerNorm over the last axis."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    normal = (x - mean) * lax.rsqrt(variance + EPSILON)
    return normal * params[f"{name}.weight"] + params[f"{name}.bias"]


def gelu(x: Array) -> Array:
    """torch.nn.GELU with the error function."""
    return jax.nn.gelu(x, approximate=False)


def convolution(params: Arrays, name: str, x: Array, layout: Layout, **how: int) -> Array:
    """torch.nn.Conv2d without bias; `how` may hold stride, padding and groups."""
    stride, padding = how.get("stride", 1), how.get("padding", 0)
    return lax.conv_general_dilated(
        x,
        params[f"{name}.weight"],
        window_strides=(stride, stride),
        padding=((padding, padding), (padding, padding)),
        dimension_numbers=layout.dimension_numbers,
        feature_group_count=how.get("groups", 1),
    )


def batch_norm(params: Arrays, buffers: Arrays, name: str, x: Array, layout: Layout) -> Array:
    """torch.nn.BatchNorm2d in training; writes the new buffers into `buffers`."""
    axes = (0, *layout.image_axes)
    count = x.size // x.shape[layout.channel_axis]
    mean = x.mean(axes)
    variance = jnp.square(x - layout.along_channels(mean)).mean(axes)
    unbiased = variance * (count / (count - 1))
    for key, value in (("running_mean", mean), ("running_var", unbiased)):
        old = buffers[f"{name}.{key}"]
        buffers[f"{name}.{key}"] = (1 - NORM_MOMENTUM) * old + NORM_MOMENTUM * value
    buffers[f"{name}.num_batches_tracked"] += 1
    scale = params[f"{name}.weight"] * lax.rsqrt(variance + EPSILON)
    shift = params[f"{name}.bias"] - mean * scale
    return x * layout.along_channels(scale) + layout.along_channels(shift)


def max_pool(x: Array, layout: Layout, *, window: int, stride: int, padding: int) -> Array:
    """torch.nn.MaxPool2d."""
    sizes, strides, pads = [1] * 4, [1] * 4, [(0, 0)] * 4
    for axis in layout.image_axes:
        sizes[axis], strides[axis], pads[axis] = window, stride, (padding, padding)
    return lax.reduce_window(x, -jnp.inf, lax.max, tuple(sizes), tuple(strides), tuple(pads))


def attention(query: Array, key: Array, value: Array, *, causal: bool) -> Array:
    """Softmax attention of [batch, length, heads, width]."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """The mean over all but the last axis of the logits."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()
