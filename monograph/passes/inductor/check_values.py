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
Check = tuple[Callable[..., fx.Node], tuple[Any, ...]]  # makes a condition of these arguments


def check_values(program: Program) -> Program:
    """Assert before an op what its kernel in eager mode asks of its arguments; once where several ops ask the same."""
    made: set[Check] = set()

    def check(node: fx.Node) -> None:
        emit = calls_like(node)
        with node.graph.inserting_before(node):
            for condition, values in _RULES[node.target](*node.args, **node.kwargs):
                if (condition, values) not in made:
                    made.add((condition, values))
                    emit(
                        aten._assert_async.msg, condition(emit, *values), f"{node.target} takes other values"
                    )

    return rewritten(program, lambda node: node.target in _RULES, check)


def _are_probabilities(emit: Emit, values: Any) -> fx.Node:
    inside = emit(aten.logical_and.default, emit(aten.ge.Scalar, values, 0), emit(aten.le.Scalar, values, 1))
    return emit(aten.all.default, inside)


def _count_from_zero(emit: Emit, indices: Any) -> fx.Node:
    """No index is negative. The formulas check that none is too large, but take negative ones from the end."""
    return emit(aten.all.default, emit(aten.ge.Scalar, indices, 0))


def _sum_to(emit: Emit, repeats: Any, size: Any) -> fx.Node:
    return emit(aten.eq.Scalar, emit(aten.sum.default, repeats), size)


def _loss(values: Any, target: Any, *_others: Any, **_options: Any) -> list[Check]:
    return [(_are_probabilities, (values,)), (_are_probabilities, (target,))]


def _chances(values: Any, *_others: Any, **_options: Any) -> list[Check]:
    return [(_are_probabilities, (values,))]


def _repeats(repeats: Any, *, output_size: Any = None) -> list[Check]:
    return [(_count_from_zero, (repeats,)), (_sum_to, (repeats, output_size))]


def _rows(_tensor: Any, _dim: int, index: Any, *_others: Any, **_options: Any) -> list[Check]:
    return [(_count_from_zero, (index,))]


_RULES: Mapping[Any, Callable[..., list[Check]]] = {
    aten.binary_cross_entropy.default: _loss,
    aten.bernoulli.default: _chances,
    aten.repeat_interleave.Tensor: _repeats,
    aten.index_select.default: _rows,
    aten.index_add.default: _rows,
    aten.index_copy.default: _rows,
    aten.index_reduce.default: _rows,
}
