"""Checks of values that eager mode's kernels make, where a compiler has formulas for the ops that take any values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from monograph.ir.program import Program
from monograph.passes.inductor.rewrite import calls_like, rewritten

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


def check_values(program: Program) -> Program:
    """Assert before an op what its kernel in eager mode asks of its arguments."""
    return rewritten(program, lambda node: node.target in _RULES, _check)


def _check(node: fx.Node) -> None:
    emit = calls_like(node)
    with node.graph.inserting_before(node):
        right = _RULES[node.target](emit, *node.args, **node.kwargs)
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
