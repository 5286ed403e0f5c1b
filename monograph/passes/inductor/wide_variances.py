"""Variances are computed in float64, as eager's kernels compute them: squares of large numbers would overflow."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from monograph.ir.meta import form, origin, set_origin
from monograph.ir.program import Program
from monograph.passes.inductor.rewrite import calls_like, rewritten

aten = torch.ops.aten
_VARIANCES = (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def wide_variances(program: Program) -> Program:
    """Compute each variance that the program asks for on float64 numbers. Those in norms are part of their ops."""
    return rewritten(program, _is_narrow, _widen)


def _is_narrow(node: fx.Node) -> bool:
    given = form(node.args[0]) if node.target in _VARIANCES and isinstance(node.args[0], fx.Node) else None
    return given is not None and given.dtype in _NARROW


def _widen(node: fx.Node) -> None:
    """Put casts before and after, in the type of the argument."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    given = form(source)
    assert given is not None
    graph, call = node.graph, calls_like(node)

    def cast(item: fx.Node, dtype: torch.dtype) -> fx.Node:
        return call(aten._to_copy.default, item, dtype=dtype)

    with graph.inserting_before(node):
        wide = call(node.target, cast(source, torch.float64), *node.args[1:], **node.kwargs)
        parts = [user for user in node.users if user.target is getitem]
        if parts:
            results = {part: graph.call_function(getitem, (wide, part.args[1])) for part in parts}
        else:
            results = {node: wide}
        for old, new in results.items():
            set_origin(new, origin(old))
            old.replace_all_uses_with(cast(new, given.dtype))
    for old in (*parts, node):
        graph.erase_node(old)
