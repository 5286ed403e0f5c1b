"""Ops on `bool` and `uint8` to which the compiler gives another type than eager mode, or another shape.

Sums of `bool` with `alpha` it computes in int64 and writes them over the memory after the result; `any` of `uint8` is
`bool` there; and it takes no dimensions at all for all of them.
"""

from __future__ import annotations

import torch
from torch import fx

from monograph.ir.meta import form
from monograph.ir.program import Program
from monograph.passes.inductor.rewrite import calls_like, put_in_place, rewritten

aten = torch.ops.aten
_ANY = (aten.any.default, aten.any.dim, aten.any.dims)
_OVER_DIMS = (aten.any.dims, aten.all.dims)


def small_types(program: Program) -> Program:
    """Write such ops by others that mean the same."""
    return rewritten(program, _is_lost, _write_anew)


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
    graph, made, call = node.graph, form(node), calls_like(node)
    assert made is not None

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
        put_in_place(result, node)
    graph.erase_node(node)
