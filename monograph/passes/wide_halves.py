"""Ops on half types that the compiler takes apart are computed in float32, and rounded once, as eager's kernels do it."""

from __future__ import annotations

import torch
from torch import fx

from monograph.ir.fill import fill_meta
from monograph.ir.meta import compute_nodes, form, origin, set_origin
from monograph.ir.program import Program

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)

# Each part would round: these torch takes apart in the type of their arguments, others in float32.
_TAKEN_APART = (
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.glu.default,
)


def wide_halves(program: Program) -> Program:
    """Put casts to float32 before such ops, and back after them."""
    if not any(map(_is_half, compute_nodes(program.graph))):
        return program
    program = program.rebuilt()
    for node in list(filter(_is_half, compute_nodes(program.graph))):
        _widen(node)
    fill_meta(program.graph)
    return program


def _is_half(node: fx.Node) -> bool:
    if node.target not in _TAKEN_APART:
        return False
    made = form(node)
    return made is not None and made.dtype in _HALF


def _widen(node: fx.Node) -> None:
    graph, made = node.graph, form(node)
    assert made is not None

    def cast(item: fx.Node, dtype: torch.dtype) -> fx.Node:
        result = graph.call_function(aten._to_copy.default, (item,), {"dtype": dtype})
        set_origin(result, origin(node))
        return result

    def wide(item: fx.Node) -> fx.Node:
        given = form(item)
        return item if given is None or given.dtype not in _HALF else cast(item, torch.float32)

    with graph.inserting_before(node):
        arguments = fx.map_arg(node.args, wide)
        op = graph.call_function(node.target, arguments, dict(node.kwargs))  # type: ignore[arg-type]
        set_origin(op, origin(node))
        node.replace_all_uses_with(cast(op, made.dtype))
    graph.erase_node(node)
