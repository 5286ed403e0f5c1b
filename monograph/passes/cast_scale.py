"""Casts and scaling of mixed precision, written so that a compiler can put them into the kernels around them."""

from __future__ import annotations

import math
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from monograph.ir.meta import TensorMeta, compute_nodes, form, value
from monograph.ir.program import Program
from monograph.passes.effects import Memory
from monograph.passes.inductor.rewrite import calls_like, put_in_place, rewritten

aten = torch.ops.aten
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale.default


def cast_scale(program: Program) -> Program:
    """Unscale each gradient by an op of its own, next to its cast, and drop casts there and back.

    A gradient scaler unscales all gradients in one op, which has to wait for the last of them and keeps their casts
    from merging with what reads them.
    """
    return rewritten(_without_round_trips(program), lambda node: node.target is _UNSCALE, _write_out)


def _without_round_trips(program: Program) -> Program:
    """A half-precision value that is cast to float32 and back is itself."""
    memory = Memory(program.graph)
    instead: dict[fx.Node, fx.Node] = {}
    for node in compute_nodes(program.graph):
        wide = node.args[0] if node.target is aten._to_copy.default else None
        if not isinstance(wide, fx.Node) or wide.target is not aten._to_copy.default:
            continue
        source, wider = wide.args[0], form(wide)
        if (
            isinstance(source, fx.Node)
            and wider is not None
            and wider.dtype is torch.float32
            and form(node) == (known := form(source))
            and known is not None
            and known.is_half
            and not memory.is_visible(node)
        ):
            instead[node] = instead.get(source, source)
    return program.rebuilt(instead=instead) if instead else program


def _write_out(node: fx.Node) -> None:
    """Write one op over all gradients as a product for each, and the largest magnitudes, to find infinities."""
    gradients, found, inverse = node.args
    assert isinstance(gradients, (list, tuple))
    parts = {user.args[1]: user for user in node.users if user.target is getitem}
    unscaled = list(parts[0].users) if 0 in parts else []
    if len(parts) != len(node.users) or any(user.target is not getitem for user in unscaled):
        return  # read as a list
    measured = [item for item in gradients if _has_elements(item)]
    if not measured:
        return
    graph, put = node.graph, calls_like(node)
    with graph.inserting_before(node):
        products = {
            index: item if _is_one(inverse) else put(aten.mul.Tensor, item, inverse)
            for index, item in enumerate(gradients)
        }
        norms = [put(aten.linalg_vector_norm.default, item, math.inf) for item in measured]
        largest = put(aten.stack.default, norms)
        finite = put(
            aten.all.default, put(aten.lt.Scalar, largest, math.inf)
        )  # what is no number is not less
        flag = put(aten._to_copy.default, put(aten.logical_not.default, finite), dtype=torch.float32)
        flagged = put(aten.maximum.default, found, flag)
    for user in unscaled:
        _replace(user, products[cast(int, user.args[1])])
    for index, user in parts.items():
        if index == 1:
            _replace(user, flagged)
        else:
            graph.erase_node(user)
    graph.erase_node(node)


def _is_one(scale: Any) -> bool:
    """True where a scaler only looks at gradients, which a fused optimizer scales itself."""
    return scale.target is aten.full.default and scale.args[1] == 1


def _has_elements(node: Any) -> bool:
    described = value(node)
    return isinstance(described, TensorMeta) and 0 not in described.shape


def _replace(node: fx.Node, other: fx.Node) -> None:
    put_in_place(other, node)
    node.graph.erase_node(node)
