"""Recurrent layers of the CPU as one op each, for compilers that run a step without grad mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monograph.ir.meta import grad_mode
from monograph.ir.own_ops import RECURRENT_LAYER, RECURRENT_LAYER_BACKWARD
from monograph.ir.program import Program

aten = torch.ops.aten
# torch's op -> ours, and where torch's takes the list of batch sizes, which ours has not
_OURS: dict[Any, tuple[Any, int]] = {
    aten.mkldnn_rnn_layer.default: (RECURRENT_LAYER, 8),
    aten.mkldnn_rnn_layer_backward.default: (RECURRENT_LAYER_BACKWARD, 20),
}


def recurrent(program: Program) -> Program:
    """Call the fused layers that train by ops that keep what the backward needs in any grad mode."""
    if not any(_trains(node) for node in program.graph.nodes):
        return program
    changed = program.rebuilt()
    for node in filter(_trains, changed.graph.nodes):
        node.target, place = _OURS[node.target]
        node.args = (*node.args[:place], *node.args[place + 1 :])
    return changed


def _trains(node: fx.Node) -> bool:
    return node.target in _OURS and grad_mode(node) is not False and not node.args[_OURS[node.target][1]]
