"""Rules for norms, losses and dropout: the kernels of their gradients read what belongs together side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from monograph.artifact.bounds.given import Given, Limit, Rule
from monograph.ir.meta import TensorMeta
from monograph.layout import contiguous_stride

_BATCH_NORMS: Final = (
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_functional",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_with_update_functional",
    "aten::native_batch_norm_backward",
    "aten::batch_norm_backward",
)
_OF_CHANNELS: Final = (
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "save_mean",
    "save_var",
    "save_invstd",
)


def _batch_norm(given: Given) -> None:
    """A batch norm or its gradient: what there is for each channel is read as if it were contiguous."""
    x = given.tensor("input")
    given.need(len(x.shape) >= 2 and x.dtype.is_floating_point, "input")
    if "grad_out" in given.values:
        given.need_like(x, "grad_out")
    for name in given.present(*_OF_CHANNELS):
        item = given.tensor(name)
        given.need(item.shape in (x.shape[1:2], (0,)) and item.dtype.is_floating_point, name)
        given.need(item.stride == contiguous_stride(item.shape), name)
        may_be_empty = name.startswith("save") and not given.values.get("train", True)
        given.need(item.shape != (0,) or may_be_empty, name)


def _layer_norm_backward(given: Given) -> None:
    x, form = given.tensor("input"), tuple(given["normalized_shape"])
    split = len(x.shape) - len(form)
    given.need(len(form) > 0 and split >= 0 and x.shape[split:] == form, "normalized_shape")
    given.need_like(x, "grad_out")
    given.need_floats((*x.shape[:split], *[1] * len(form)), given.present("mean", "rstd"))
    given.need_floats(form, given.present("weight", "bias"))


def _group_norm(given: Given) -> None:
    x, count, channels, groups = given.tensor("input"), given["N"], given["C"], given["group"]
    given.need(len(x.shape) >= 2 and x.dtype.is_floating_point and x.shape[:2] == (count, channels), "N", "C")
    given.need(given["HxW"] == math.prod(x.shape[2:]), "HxW")
    given.need(groups > 0 and channels > 0 and channels % groups == 0, "group")
    given.need_floats((channels,), given.present("weight", "bias"))
    if "grad_out" in given.values:
        given.need_like(x, "grad_out")
        given.need_floats((count, groups), ("mean", "rstd"))


def _weight_norm(direction: str, magnitude: str, *others: str) -> Rule:
    def rule(given: Given) -> None:
        v, dim = given.tensor(direction), given["dim"]
        given.need(0 not in v.shape and type(dim) is int and dim in (0, len(v.shape) - 1), "dim")
        each = tuple(size if place == dim else 1 for place, size in enumerate(v.shape))
        for name in (magnitude, *others):
            given.need_form(v.shape if name == "grad_w" else each, v.dtype, name)

    return rule


def _dropout_backward(given: Given) -> None:
    grad, mask = given.tensor("grad_output"), given.tensor("mask")
    given.need(grad.shape == mask.shape and mask.dtype is torch.bool and grad.dtype.is_floating_point, "mask")


def _nll_loss_backward(given: Given) -> Iterator[Limit]:
    x, target, total = map(given.tensor, ("self", "target", "total_weight"))
    given.need(len(x.shape) in (1, 2, 4), "self")
    classes = x.shape[0] if len(x.shape) == 1 else x.shape[1]
    given.need(target.shape == (x.shape[:1] + x.shape[2:] if len(x.shape) > 1 else ()), "target")
    _need_gradient_of_loss(given, x, target)
    given.need((math.prod(total.shape), total.dtype) == (1, x.dtype), "total_weight")
    given.need(target.dtype in (torch.int64, torch.uint8), "target")
    yield Limit("target", 0, classes - 1, besides=given["ignore_index"])


def _multi_margin_loss_backward(given: Given) -> Iterator[Limit]:
    x, target = given.tensor("self"), given.tensor("target")
    given.need(len(x.shape) == 2 and 0 not in x.shape and target.shape == x.shape[:1], "self")
    _need_gradient_of_loss(given, x, target)
    given.need(target.dtype is torch.int64, "target")
    yield Limit("target", 0, x.shape[1] - 1)


def _need_gradient_of_loss(given: Given, x: TensorMeta, target: TensorMeta) -> None:
    given.need(given["reduction"] in (0, 1, 2), "reduction")
    given.need_form(target.shape if given["reduction"] == 0 else (), x.dtype, "grad_output")
    classes = x.shape[0] if len(x.shape) == 1 else x.shape[1]
    given.need_form((classes,), x.dtype, *given.present("weight"))


NORMS: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm,
    "aten::_weight_norm_interface": _weight_norm("v", "g"),
    "aten::_weight_norm_interface_backward": _weight_norm("saved_v", "saved_g", "saved_norms", "grad_w"),
    "aten::native_dropout_backward": _dropout_backward,
    "aten::nll_loss_backward": _nll_loss_backward,
    "aten::nll_loss2d_backward": _nll_loss_backward,
    "aten::multi_margin_loss_backward": _multi_margin_loss_backward,
}
