"""Recurrent layers of the CPU as one op each, for compilers that run a step without grad mode."""

from __future__ import annotations

from dataclasses import replace
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
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        copied = new[node] = graph.node_copy(node, new.__getitem__)
        copied.meta = dict(node.meta)
        if _trains(node):
            copied.target, place = _OURS[node.target]
            copied.args = (*copied.args[:place], *copied.args[place + 1 :])
    return replace(program, module=fx.GraphModule(program.module, graph))


def _trains(node: fx.Node) -> bool:
    return node.target in _OURS and grad_mode(node) is not False and not node.args[_OURS[node.target][1]]
