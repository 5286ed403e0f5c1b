"""Recurrent layers of the CPU for compilers: those of float32 that train as a loop of our own, others as one op each."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph.ir.evaluate import fill_meta
from monograph.ir.meta import form, grad_mode
from monograph.ir.own_ops import RECURRENT_LAYER, RECURRENT_LAYER_BACKWARD
from monograph.ir.program import Program
from monograph.passes.inductor.recurrence import Layer
from monograph.passes.inductor.rewrite import calls_like, put_results
from monograph.passes.inductor.unrolled import UNROLLED, write_unrolled

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default
# torch's op -> ours, and where torch's takes the list of batch sizes, which ours has not
_OURS: dict[Any, tuple[Any, int]] = {
    _FORWARD: (RECURRENT_LAYER, 8),
    _BACKWARD: (RECURRENT_LAYER_BACKWARD, 20),
}
_LSTM = 2  # among the modes of oneDNN's layers
_WORKSPACE = 3  # among the results


def recurrent(program: Program) -> Program:
    """Write the fused layers that train as products and a loop, and call others by ops that keep what the backward needs.

    torch's ops keep that in grad mode alone.
    """
    if not any(_trains(node) or node.target in UNROLLED for node in program.graph.nodes):
        return program
    changed = program.rebuilt()
    write_unrolled(changed.graph)
    for node in list(filter(_trains, changed.graph.nodes)):
        if node.target is _FORWARD:
            _write_as_loop(node)
    for node in filter(_trains, changed.graph.nodes):
        node.target, place = _OURS[node.target]
        node.args = (*node.args[:place], *node.args[place + 1 :])
    fill_meta(changed.graph)
    return changed


def _trains(node: fx.Node) -> bool:
    return node.target in _OURS and grad_mode(node) is not False and not node.args[_OURS[node.target][1]]


def _write_as_loop(node: fx.Node) -> None:
    """Write a layer and its backwards as products and loops, where there is code for it and nothing else takes its workspace."""
    layer, backwards = _layer(node), _backwards(node)
    if layer is None or not backwards:
        return
    with node.graph.inserting_before(node):
        call = calls_like(node)
        block = layer.forward(call)
        results = {
            0: lambda: layer.part(call, block, "states"),
            1: lambda: layer.last(call, block, "states"),
            2: lambda: layer.last(call, block, "cells"),
        }
        put_results(node, results)
    for backward in backwards:
        with node.graph.inserting_before(backward):
            _write_backward(layer, block, backward)
    for workspace in list(node.users):
        node.graph.erase_node(workspace)
    node.graph.erase_node(node)


def _write_backward(layer: Layer, block: fx.Node, node: fx.Node) -> None:
    call, of_states, of_last, of_cells = calls_like(node), *node.args[10:13]
    made = layer.backward(call, block, (of_states, of_last, of_cells))
    results: dict[int, Callable[[], fx.Node]] = {
        0: lambda: layer.of_x(call, made),
        1: lambda: layer.of_weight(call, made, block, 0),
        2: lambda: layer.of_weight(call, made, block, 1),
        3: lambda: layer.of_bias(call, made, 0),
        4: lambda: layer.of_bias(call, made, 1),
        5: lambda: layer.part(call, made, "of_first"),
        6: lambda: layer.part(call, made, "of_cells"),
    }
    put_results(node, results)
    node.graph.erase_node(node)


def _backwards(node: fx.Node) -> list[fx.Node]:
    """The backwards that take the workspace of a layer; none if anything else does."""
    takers = [
        user
        for item in node.users
        if item.target is getitem and item.args[1] == _WORKSPACE
        for user in item.users
    ]
    return takers if all(user.target is _BACKWARD for user in takers) else []


def _layer(node: fx.Node) -> Layer | None:
    """What a layer of torch's is; None if it is of another kind or type, or has no code.

    Each call of the op is one direction of one layer, whatever its arguments say about all of them, and its input begins with steps.
    """
    tensors = [item for item in node.args[:7] if isinstance(item, fx.Node)]
    reverse, lengths, mode, _, _, has_biases = node.args[7:13]
    described = [item for item in map(form, tensors) if item is not None and item.dtype is torch.float32]
    if len(described) < 7 or lengths or mode != _LSTM:
        return None
    x, of_input, of_state, *biases, hidden, cells = tensors
    steps, rows, numbers = described[0].shape
    sizes = (steps, rows, numbers, described[2].shape[1])
    both = (biases[0], biases[1]) if has_biases else None
    layer = Layer("lstm", bool(reverse), x, (of_input, of_state), both, hidden, cells, sizes)
    return layer if layer.can_be_made else None
