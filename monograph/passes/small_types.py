"""Ops on `bool` and `uint8` to which the compiler gives another type than eager mode, or another shape.

Sums of `bool` with `alpha` it computes in int64 and writes them over what lies behind the result; `any` of `uint8` is
`bool` there; and it takes no dimensions at all for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monograph.ir.fill import fill_meta
from monograph.ir.meta import compute_nodes, form, origin, set_origin, set_value, value
from monograph.ir.program import Program

aten = torch.ops.aten
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)
_OVER_DIMS = (aten.any.dims, aten.all.dims)


def small_types(program: Program) -> Program:
    """Write such ops by others that mean the same."""
    if not any(map(_is_lost, compute_nodes(program.graph))):
        return program
    program = program.rebuilt()
    for node in list(filter(_is_lost, compute_nodes(program.graph))):
        _write_anew(node)
    fill_meta(program.graph)
    return program


def _is_lost(node: fx.Node) -> bool:
    made = form(node)
    if made is None:
        return False
    if node.target is aten.add.Tensor:
        alpha = node.kwargs.get("alpha", 1)
        return made.dtype is torch.bool and not isinstance(alpha, fx.Node) and bool(alpha != 1)
    return _reduces_nothing(node) or (node.target in _ANY and made.dtype is torch.uint8)


def _reduces_nothing(node: fx.Node) -> bool:
    return node.target in _OVER_DIMS and node.args[1:2] in (([],), ((),))


def _write_anew(node: fx.Node) -> None:
    graph, made = node.graph, form(node)
    assert made is not None

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        result = graph.call_function(target, args, kwargs)
        set_origin(result, origin(node))
        return result

    with graph.inserting_before(node):
        if node.target is aten.add.Tensor:
            first, second = node.args
            result = call(aten.add.Tensor, first, call(aten.mul.Tensor, second, bool(node.kwargs["alpha"])))
        else:
            result = call(aten.ne.Scalar, node.args[0], 0)
            if not _reduces_nothing(node):
                result = call(node.target, result, *node.args[1:], **node.kwargs)
            if made.dtype is torch.uint8:
                result = call(aten._to_copy.default, result, dtype=torch.uint8)
        set_value(result, value(node))
        node.replace_all_uses_with(result)
    graph.erase_node(node)
