"""Strategies for modules with random options, each together with an input that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import torch
from hypothesis import strategies as st

from monograph.testing.strategies.module_case import Construction, ModuleCase, make
from monograph.testing.strategies.spec import TensorSpec
from monograph.testing.strategies.tensors import SEEDS, Draw, Layout, Shape, shapes, tensor_specs
from monograph.testing.strategies.values import Values

Inputs = tuple[Any, ...]
_MODULE_LAYOUTS: Final[tuple[Layout, ...]] = ("contiguous", "permuted", "gapped", "offset")
_MODULE_VALUES: Final[tuple[Values, ...]] = ("whole", "normal")
_ACTIVATIONS: Final = ("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "LeakyReLU", "Softplus", "Hardswish")
_SIDE: Final = st.integers(1, 5)


@st.composite
def modules(draw: Draw, kinds: Sequence[str] | None = None) -> ModuleCase:
    """A module of one of the `kinds` (all names of `MODULES` by default) and inputs for it."""
    kind = draw(st.sampled_from(tuple(MODULES) if kinds is None else tuple(kinds)))
    construction, inputs = MODULES[kind](draw, kind)
    return ModuleCase(construction, inputs, training=draw(st.booleans()), seed=draw(SEEDS))


def _input(draw: Draw, shape: Shape) -> TensorSpec:
    spec: TensorSpec = draw(
        tensor_specs(
            shape, dtypes=(torch.float32,), layouts=_MODULE_LAYOUTS, values=_MODULE_VALUES, requires_grad=True
        )
    )
    return spec


def _linear(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    fan_in, fan_out, bias = draw(_SIDE), draw(_SIDE), draw(st.booleans())
    rows = draw(shapes(max_dims=2, min_side=1))
    return make(kind, fan_in, fan_out, bias=bias), (_input(draw, (*rows, fan_in)),)


def _convolution(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    dims = int(kind[-2])
    groups = draw(st.integers(1, 2))
    fan_in, fan_out = (groups * draw(st.integers(1, 3)) for _ in range(2))
    kernel, dilation, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    padding = min(padding, kernel // 2)  # no window is in the padding only
    options = {
        "stride": draw(st.integers(1, 2)),
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "replicate", "circular"])),
    }
    least = max(dilation * (kernel - 1) + 1, padding + 1)
    sides = tuple(draw(st.integers(least, least + 3)) for _ in range(dims))
    return make(kind, fan_in, fan_out, kernel, **options), (_input(draw, (draw(_SIDE), fan_in, *sides)),)


def _batch_norm(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    dims = int(kind[-2])
    channels = draw(_SIDE)
    options = {
        "momentum": draw(st.sampled_from([0.1, 0.5])),  # with None a graph refuses it by name
        "affine": draw(st.booleans()),
        "track_running_stats": draw(st.booleans()),
    }
    sides = tuple(draw(_SIDE) for _ in range(dims))
    # more than one value for each channel, which training needs
    return make(kind, channels, **options), (_input(draw, (draw(st.integers(2, 5)), channels, *sides)),)


def _layer_norm(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    normalized, rows = draw(shapes(min_dims=1, max_dims=2, min_side=1)), draw(shapes(max_dims=2, min_side=1))
    module = make(kind, normalized, elementwise_affine=draw(st.booleans()))
    return module, (_input(draw, (*rows, *normalized)),)


def _group_norm(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    # more than one value in each group
    shape = (draw(_SIDE), groups * each, draw(st.integers(2, 5)))
    return make(kind, groups, groups * each, affine=draw(st.booleans())), (_input(draw, shape),)


def _embedding(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    words, width = draw(_SIDE), draw(_SIDE)
    options = {
        "padding_idx": draw(st.none() | st.integers(0, words - 1)),
        "scale_grad_by_freq": draw(st.booleans()),
    }
    index = tensor_specs(shapes(max_dims=3), dtypes=(torch.int64,), values=("whole",), low=0, high=words)
    return make(kind, words, width, **options), (draw(index),)


def _recurrent(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    width, hidden, layers = draw(_SIDE), draw(_SIDE), draw(st.integers(1, 2))
    options = {
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
    }
    batch, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    leading = (batch, steps) if options["batch_first"] else (steps, batch)
    inputs: list[Any] = [_input(draw, (*leading, width))]
    if draw(st.booleans()):
        state = _input(draw, (layers * (1 + options["bidirectional"]), batch, hidden))
        inputs.append((state, state) if kind == "LSTM" else state)
    return make(kind, width, hidden, layers, **options), tuple(inputs)


def _activation(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    return make(kind), (_input(draw, draw(shapes())),)


def _softmax(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    shape = draw(shapes(min_dims=1))
    return make(kind, dim=draw(st.integers(-len(shape), len(shape) - 1))), (_input(draw, shape),)


def _pooling(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    dims = int(kind[-2])
    kernel = draw(st.integers(1, 3))
    options = {"stride": draw(st.integers(1, 2)), "ceil_mode": draw(st.booleans())}
    sides = tuple(draw(st.integers(kernel, kernel + 3)) for _ in range(dims))
    module = make(kind, kernel, padding=draw(st.integers(0, kernel // 2)), **options)
    return module, (_input(draw, (draw(_SIDE), draw(_SIDE), *sides)),)


def _adaptive_pooling(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    shape = tuple(draw(_SIDE) for _ in range(2 + int(kind[-2])))
    return make(kind, draw(st.integers(1, 3))), (_input(draw, shape),)


def _dropout(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    return make(kind, draw(st.sampled_from([0.5, 0.0, 0.2, 1.0]))), (_input(draw, draw(shapes())),)


def _sequential(draw: Draw, kind: str) -> tuple[Construction, Inputs]:
    """Linear layers with what stands between them."""
    widths = draw(st.lists(_SIDE, min_size=2, max_size=4))
    layers: list[Construction] = []
    for fan_in, fan_out in pairwise(widths):
        between = ("LayerNorm", "Dropout", *_ACTIVATIONS)
        follower = draw(st.sampled_from(between))
        options = {"LayerNorm": (fan_out,), "Dropout": (0.5,)}.get(follower, ())
        layers += [make("Linear", fan_in, fan_out), make(follower, *options)]
    return make(kind, *layers), (_input(draw, (draw(_SIDE), widths[0])),)


MODULES: Final[Mapping[str, Callable[[Draw, str], tuple[Construction, Inputs]]]] = MappingProxyType(
    {
        "Linear": _linear,
        **dict.fromkeys(("Conv1d", "Conv2d"), _convolution),
        **dict.fromkeys(("BatchNorm1d", "BatchNorm2d"), _batch_norm),
        "LayerNorm": _layer_norm,
        "GroupNorm": _group_norm,
        "Embedding": _embedding,
        **dict.fromkeys(("RNN", "LSTM", "GRU"), _recurrent),
        **dict.fromkeys(_ACTIVATIONS, _activation),
        **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
        **dict.fromkeys(("MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d"), _pooling),
        **dict.fromkeys(("AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d"), _adaptive_pooling),
        "Dropout": _dropout,
        "Sequential": _sequential,
    }
)
