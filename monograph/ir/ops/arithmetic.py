"""The arithmetic of an op, counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import flops_of, has_flops
from monograph.ir.call.nested import tensors_in
from monograph.ir.evaluate import example, example_arguments
from monograph.ir.meta import value
from monograph.ir.ops.unrolled import UNROLLED_LAYER, UNROLLED_LAYER_BACKWARD
from monograph.ir.own_ops import RECURRENT_LAYER, RECURRENT_LAYER_BACKWARD

# of a recurrent layer: products with each matrix at each step of each sequence, the place of the input, those of the weights
_RECURRENT: Final[Mapping[object, tuple[int, int, slice]]] = {
    torch.ops.aten.mkldnn_rnn_layer.default: (1, 0, slice(1, 3)),
    torch.ops.aten.mkldnn_rnn_layer_backward.default: (2, 0, slice(1, 3)),
    RECURRENT_LAYER: (1, 0, slice(1, 3)),
    RECURRENT_LAYER_BACKWARD: (2, 0, slice(1, 3)),
    UNROLLED_LAYER: (1, 0, slice(2, 3)),
    UNROLLED_LAYER_BACKWARD: (2, 2, slice(4, 5)),
}


def flops(node: fx.Node) -> int:
    """Floating point operations of a node at the sizes of its graph."""
    if not (node.target in _RECURRENT or has_flops(node.target)):
        return 0
    args, kwargs = example_arguments(node)
    return flops_of_call(node.target, args, kwargs, example(value(node)))


def flops_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> int:
    """Floating point operations of matrix products, convolutions, attention and recurrent layers; 0 for any other op."""
    if target not in _RECURRENT:
        return flops_of(target, args, kwargs, made)
    products, place, weights = _RECURRENT[target]
    shapes = [item.shape for item in tensors_in(args[weights])]
    sizes = [shape[0] * shape[1] for shape in shapes if len(shape) == 2]
    steps, sequences = args[place].shape[:2]
    return int(2 * products * steps * sequences * sum(sizes))
