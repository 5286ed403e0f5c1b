"""The gradient of the logits of a loss over classes in blocks of rows: the one of their logarithms is never there as a whole."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from monograph.ir.meta import TensorMeta, come_from, form, set_value
from monograph.ir.own_ops import CLASS_LOSS_BACKWARD
from monograph.ir.program import Program
from monograph.layout import Layout

aten = torch.ops.aten
_LOSSES: Final = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
_SOFTMAX_BACKWARD: Final = aten._log_softmax_backward_data.default
_LEAST_BYTES: Final = 1 << 20  # of logits


def loss_in_blocks(program: Program) -> Program:
    """Write the backward of a loss and of the softmax before it as one op of ours, on the CPU."""
    parts = tuple(map(loss_in_blocks, program.parts))
    if any(part is not before for part, before in zip(parts, program.parts, strict=True)):
        program = program.with_parts(parts)
    found = [node for node in program.graph.nodes if _is_of_loss(node)]
    if not found:
        return program
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node in found:
            new[node] = _in_blocks(graph, node, new)
        elif not (node.target in _LOSSES and next(iter(node.users), None) in found):
            new[node] = graph.node_copy(node, new.__getitem__)
    return program.with_graph(graph)


def loss_as_a_whole(program: Program) -> Program:
    """Write it with torch's ops again."""
    program = program.with_parts(tuple(map(loss_as_a_whole, program.parts)))
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        whole = node.target is CLASS_LOSS_BACKWARD
        new[node] = _as_two_ops(graph, node, new) if whole else graph.node_copy(node, new.__getitem__)
    return program.with_graph(graph)


def _is_of_loss(node: fx.Node) -> bool:
    """True for the backward of a softmax along the classes, whose gradient is that of a loss and read by nothing else."""
    if node.target is not _SOFTMAX_BACKWARD:
        return False
    grad, softmax, dim, _ = node.args
    described = form(node)
    return (
        isinstance(grad, fx.Node)
        and grad.target in _LOSSES
        and grad.args[1] is softmax
        and len(grad.users) == 1
        and isinstance(dim, int)
        and dim == 1
        and isinstance(softmax, fx.Node)
        and form(softmax) == described
        and isinstance(described, TensorMeta)
        and described.device.type == "cpu"
        and described.extent >= _LEAST_BYTES
        and Layout(described.shape, described.stride).is_like(Layout.contiguous(*described.shape))
    )


def _in_blocks(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    grad = node.args[0]
    assert isinstance(grad, fx.Node)
    args = fx.node.map_arg(grad.args, new.__getitem__)
    made = graph.create_node("call_function", CLASS_LOSS_BACKWARD, args, name=node.name)
    come_from(made, node)
    described = form(node)
    assert described is not None
    set_value(made, described)
    return made


def _as_two_ops(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    args: tuple[Any, ...] = fx.node.map_arg(node.args, new.__getitem__)
    softmax, described = args[1], form(node)
    assert described is not None
    op = aten.nll_loss2d_backward.default if len(described.shape) > 2 else aten.nll_loss_backward.default
    grad = graph.create_node("call_function", op, args, name=f"{node.name}_of_loss")
    options = (grad, softmax, 1, described.dtype)
    made = graph.create_node("call_function", _SOFTMAX_BACKWARD, options, name=node.name)
    for item in (grad, made):
        come_from(item, node)
        set_value(item, described)
    return made
