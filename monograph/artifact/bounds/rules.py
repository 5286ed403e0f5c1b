"""Ops whose kernels believe what they are given: which forms fit, and which values are looked at before each call.

A rule gets a call's arguments by their names. It raises `Damaged` for what does not fit, and gives a `Limit` for each
tensor whose values have to be between two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from monograph.artifact.bounds.attention import ATTENTION
from monograph.artifact.bounds.describe import described_result
from monograph.artifact.bounds.given import Given, Limit, Rule, alike, gradient
from monograph.artifact.bounds.indexed import INDEXED
from monograph.artifact.bounds.norms import NORMS
from monograph.ir.meta import TensorMeta
from monograph.ir.ops.fused import FUSED_NAMES
from monograph.layout import contiguous_stride, fills_a_block

aten = torch.ops.aten
_MAY_BE_EMPTY: Final = ("max_exp_avg_sqs", "momentum_buffer_list")


# --- lists of tensors ----------------------------------------------------------------------------------------------


def _lists_of_one_length(given: Given) -> None:
    lists = [item for item in given.values.values() if isinstance(item, (list, tuple))]
    given.need(len({len(item) for item in lists}) == 1, "lists")


def _fused_update(given: Given) -> None:
    """Tensors of one parameter are read side by side, as they are in memory."""
    lists = {name: item for name, item in given.values.items() if isinstance(item, (list, tuple))}
    count = len(lists["self"])
    for name, items in lists.items():
        given.need(len(items) in ((0, count) if name in _MAY_BE_EMPTY else (count,)), name)
        for first, item in zip(lists["self"], items, strict=False):
            fits = isinstance(first, TensorMeta) and isinstance(item, TensorMeta)
            given.need(fits and first.dtype.is_floating_point, name)
            if name == "state_steps":
                given.need(item.shape == () and item.dtype is torch.float32, name)
            else:
                given.need((item.shape, item.dtype) == (first.shape, first.dtype), name)
                given.need(item.stride == contiguous_stride(item.shape) or item.stride == first.stride, name)
                given.need(math.prod(item.shape) == 0 or fills_a_block(item.shape, item.stride), name)
    needed = {"max_exp_avg_sqs": given.values.get("amsgrad")}
    needed["momentum_buffer_list"] = given.values.get("momentum", 0) != 0
    for name in lists:
        given.need(len(lists[name]) == count or not needed.get(name, True), name)
    for name in ("grad_scale", "found_inf", "lr"):
        item = given.values.get(name)
        given.need(not isinstance(item, TensorMeta) or math.prod(item.shape) == 1, name)


# --- distances and Fourier transforms ------------------------------------------------------------------------------


def _cdist_backward(given: Given) -> None:
    made = described_result(aten._cdist_forward.default, *map(given.tensor, ("x1", "x2")), 2.0, None)
    given.need_like(made, "grad", "cdist")
    given.need(given.tensor("x1").shape[:-2] == given.tensor("x2").shape[:-2], "x2")


def _transform(given: Given) -> None:
    """A Fourier transform; a real one of a complex tensor needs half of the frequencies."""
    x, dims = given.tensor("self"), given["dim"]
    given.need(all(type(dim) is int and 0 <= dim < len(x.shape) for dim in dims), "dim")
    given.need(0 < len(dims) == len(set(dims)), "dim")
    size = given.values.get("last_dim_size")
    if size is not None:
        given.need(x.dtype.is_complex and size > 0 and x.shape[dims[-1]] == size // 2 + 1, "last_dim_size")


def _pair_distances(given: Given) -> None:
    given.need(len(given.tensor("self").shape) == 2, "self")


def _pair_distances_backward(given: Given) -> None:
    x = given.tensor("self")
    given.need(len(x.shape) == 2 and x.shape[0] > 1 and x.shape[1] > 0, "self")
    given.need_form((x.shape[0] * (x.shape[0] - 1) // 2,), x.dtype, "grad", "pdist")


# --- attention and linear algebra ------------------------------------------------------------------------------------


def _pivots(matrix: str, pivots: str) -> Rule:
    """Rows that were exchanged, counted from 1."""

    def rule(given: Given) -> Iterator[Limit]:
        lu = given.tensor(matrix)
        given.need(len(lu.shape) >= 2, matrix)
        given.need_form((*lu.shape[:-2], min(lu.shape[-2:])), torch.int32, pivots)
        yield Limit(pivots, 1, lu.shape[-2])

    return rule


# --- recurrent layers ----------------------------------------------------------------------------------------------

_GATES: Final = {2: 4, 3: 3}  # LSTM and GRU


def _recurrent_layer(given: Given) -> None:
    x = given.tensor("input")
    given.need(given["mode"] in _GATES and not given["batch_sizes"], "mode", "batch_sizes")
    given.need(len(x.shape) == 3 and 0 not in x.shape, "input")
    hidden, gates = given["hidden_size"], _GATES[given["mode"]] * given["hidden_size"]
    _steps, batch, size = x.shape
    given.need_form((gates, size), x.dtype, "weight0")
    given.need_form((gates, hidden), x.dtype, "weight1")
    if given["has_biases"]:
        given.need_form((gates,), x.dtype, "weight2", "weight3")
    for name in ("hx_", "cx_"):
        state = given.tensor(name)
        given.need(math.prod(state.shape) == batch * hidden and state.shape[-1:] == (hidden,), name)
        given.need(state.dtype is x.dtype, name)


def _recurrent_layer_backward(given: Given) -> None:
    """The kernel goes by what the forward op left in `workspace`, of which nothing is known but who made it."""
    names = {"weight0": "weight1", "weight1": "weight2", "weight2": "weight3", "weight3": "weight4"}
    settings = ("reverse", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_sizes")
    same = {name: name for name in ("input", "hx_", *settings, "batch_first")} | names | {"cx_": "cx_tmp"}
    for position, argument in enumerate(("output", "hy_", "cy_", "workspace")):
        given.need_made_by(argument, "aten::mkldnn_rnn_layer", position, same)
    for of, name in (("output", "grad_output"), ("hy_", "grad_hy"), ("cy_", "grad_cy")):
        given.need_like(given.tensor(of), *given.present(name))


def _unrolled_layer(given: Given) -> None:
    """A layer that torch unrolls, or its backward: all that it is given fits the input and the first states."""
    x, first, weights, ways = (
        given.tensor("x"),
        given.tensor("first"),
        given["weights"],
        1 + given["both_ways"],
    )
    gates = {"gru": 3, "tanh": 1, "relu": 1}.get(given["kind"], 0)
    given.need(len(x.shape) == 3 and 0 not in x.shape and x.dtype.is_floating_point, "x")
    steps, rows, numbers = x.shape
    units = first.shape[-1] if len(first.shape) == 3 else 0
    given.need(gates > 0 and units > 0, "kind", "first")
    given.need_form((ways, rows, units), x.dtype, "first")
    wide = gates * units
    known = [(wide, numbers), (wide, units), (wide,), (wide,)][: len(weights) // ways] * ways
    forms = [(item.shape, item.dtype) if isinstance(item, TensorMeta) else None for item in weights]
    given.need(
        len(weights) in (2 * ways, 4 * ways) and forms == [(form, x.dtype) for form in known], "weights"
    )
    for name in given.present("of_states"):
        given.need_form((steps, rows, ways * units), x.dtype, name)
    for name in given.present("of_last"):
        given.need_form((ways, rows, units), x.dtype, name)
    given.need(len(given["wanted"]) == 2 + len(weights), "wanted")
    if "of_states" in given.values:
        given.need(bool(given.present("of_states", "of_last")), "of_states")


RULES: Final[Mapping[str, Rule]] = {
    **ATTENTION,
    **INDEXED,
    **NORMS,
    **{
        f"aten::{name}_backward": gradient(getattr(aten, name).default, "grad_output")
        for name in (
            *(f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3)),
            *("avg_pool2d", "avg_pool3d", "grid_sampler_3d", "gelu"),
        )
    },
    "aten::multilabel_margin_loss_backward": gradient(
        aten.multilabel_margin_loss_forward.default, "grad_output", "is_target"
    ),
    "aten::_foreach_copy": _lists_of_one_length,
    **{f"{space}{name}": _fused_update for space in ("aten::_", "monograph::") for name in FUSED_NAMES},
    "aten::_cdist_backward": _cdist_backward,
    **dict.fromkeys(("aten::_fft_c2r", "aten::_fft_r2c", "aten::_fft_c2c"), _transform),
    "aten::_pdist_forward": _pair_distances,
    "aten::_pdist_backward": _pair_distances_backward,
    "aten::_softmax_backward_data": alike("grad_output", "output"),
    "aten::_log_softmax_backward_data": alike("grad_output", "output"),
    "aten::threshold_backward": alike("grad_output", "self"),
    **dict.fromkeys(("monograph::unrolled_layer", "monograph::unrolled_layer_backward"), _unrolled_layer),
    "aten::mkldnn_rnn_layer": _recurrent_layer,
    "aten::mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    "aten::lu_unpack": _pivots("LU_data", "LU_pivots"),
    "aten::linalg_lu_solve": _pivots("LU", "pivots"),
}
