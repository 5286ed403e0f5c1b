"""The arithmetic of an op, counted."""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from monograph.compat.ops import flops_of, has_flops
from monograph.ir.evaluate import example, example_arguments
from monograph.ir.meta import form, value

_RECURRENT: Final = torch.ops.aten.mkldnn_rnn_layer.default


def flops(node: fx.Node) -> int:
    """Floating point operations of matrix products, convolutions, attention and recurrent layers; 0 for any other op."""
    if node.target is _RECURRENT:
        return _of_recurrent_layer(node)
    if not has_flops(node.target):
        return 0
    args, kwargs = example_arguments(node)
    return flops_of(node.target, args, kwargs, example(value(node)))


def _of_recurrent_layer(node: fx.Node) -> int:
    """A product with each weight for each step of each sequence."""
    given, *weights = (form(item) for item in node.args[:3])  # type: ignore[arg-type]
    if given is None:
        return 0
    sizes = [int(item.shape[0]) * int(item.shape[1]) for item in weights if item is not None]
    return 2 * int(given.shape[0]) * int(given.shape[1]) * sum(sizes)
