"""Checks of values that eager mode's kernels make, where a compiler has formulas for the ops that take any values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from monograph.ir.evaluate import fill_meta
from monograph.ir.meta import compute_nodes, origin, set_origin
from monograph.ir.program import Program

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


def check_values(program: Program) -> Program:
    """Assert before an op what its kernel in eager mode asks of its arguments."""
    if not any(node.target in _RULES for node in compute_nodes(program.graph)):
        return program
    program = program.rebuilt()
    for node in compute_nodes(program.graph):
        rule = _RULES.get(node.target)
        if rule is not None:
            _check(node, rule)
    fill_meta(program.graph)
    return program


def _check(node: fx.Node, rule: Callable[..., fx.Node]) -> None:
    graph = node.graph

    def emit(op: Any, *arguments: Any) -> fx.Node:
        made = graph.call_function(op, arguments)
        set_origin(made, origin(node))
        return made

    with graph.inserting_before(node):
        right = rule(emit, *node.args, **node.kwargs)
        emit(aten._assert_async.msg, right, f"{node.target} takes other values")


def _is_probability(emit: Emit, values: Any, *_others: Any, **_options: Any) -> fx.Node:
    inside = emit(aten.logical_and.default, emit(aten.ge.Scalar, values, 0), emit(aten.le.Scalar, values, 1))
    return emit(aten.all.default, inside)


def _fill_the_size(emit: Emit, repeats: Any, *, output_size: Any = None) -> fx.Node:
    counted = emit(aten.all.default, emit(aten.ge.Scalar, repeats, 0))
    return emit(
        aten.logical_and.default, counted, emit(aten.eq.Scalar, emit(aten.sum.default, repeats), output_size)
    )


_RULES: Mapping[Any, Callable[..., fx.Node]] = {
    aten.binary_cross_entropy.default: _is_probability,
    aten.bernoulli.default: _is_probability,
    aten.repeat_interleave.Tensor: _fill_the_size,
}
