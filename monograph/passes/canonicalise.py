"""One spelling for each view, and no copies that nobody can tell from what they copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monograph.ir.meta import compute_nodes, form
from monograph.ir.program import Program
from monograph.passes.effects import Memory, copies_in_vain, size_depends_on_data

aten = torch.ops.aten

# Views that begin where the tensor begins that they show: such a view is known by its sizes and strides alone.
_VIEWS = frozenset(
    (
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.lift_fresh.default,
        aten.permute.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    )
)
# Ops that copy, with the position of what they copy.
_COPIES: dict[Any, int] = {aten.clone.default: 0, aten._to_copy.default: 0, aten.copy.default: 1}
# Both, and slices, with the position of what they show or copy.
_SOURCES = dict.fromkeys((*_VIEWS, aten.slice.Tensor), 0) | _COPIES


def canonicalise(program: Program) -> Program:
    """Drop `detach`, views that show what is there already (`t` of `t`), and copies that change nothing.

    A result stays the object, and on the memory, that eager mode gives.
    """
    instead: dict[fx.Node, fx.Node] = {}
    first: dict[tuple[Any, ...], fx.Node] = {}  # by the tensor that is shown, sizes and strides
    shown: dict[fx.Node, fx.Node] = {}
    memory = Memory(program.graph)
    for node in compute_nodes(program.graph):
        source = _source(node)
        if source is None:
            continue
        source = instead.get(source, source)
        if node.target in _COPIES:
            if form(node) == form(source) and copies_in_vain(node, source, memory):
                instead[node] = source
                memory.merge(node, source)
        elif node.target in _VIEWS or form(node) == form(source):
            root = shown[node] = shown.get(source, source)
            if size_depends_on_data(root):
                continue  # the view checks the size
            first.setdefault((root, form(root)), root)
            same = first.setdefault((root, form(node)), node)
            if same is not node and not memory.is_returned(node):
                instead[node] = same
    return program.rebuilt(instead=instead) if instead else program


def _source(node: fx.Node) -> fx.Node | None:
    """What a view shows or a copy copies."""
    position = _SOURCES.get(node.target)
    source = node.args[position] if position is not None and position < len(node.args) else None
    return source if isinstance(source, fx.Node) and form(source) is not None else None
