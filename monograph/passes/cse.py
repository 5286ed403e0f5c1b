"""Common subexpression elimination."""

from __future__ import annotations

from typing import Any

from torch import fx

from monograph.ir.meta import compute_nodes, grad_mode
from monograph.ir.numbers import exactly
from monograph.ir.program import Program
from monograph.passes.effects import Memory, is_pure


def cse(program: Program) -> Program:
    """Compute once what is computed twice from the same inputs.

    Random ops, ops that check values and ops that do not come with torch stay as they are. Two results stay two
    objects, and on memory of their own if they were.
    """
    memory = Memory(program.graph)
    first: dict[Any, fx.Node] = {}
    instead: dict[fx.Node, fx.Node] = {}
    for node in compute_nodes(program.graph):
        if not is_pure(node):
            continue
        key = node.target, _frozen(node.args, instead), _frozen(node.kwargs, instead), grad_mode(node)
        found = first.setdefault(key, node)
        if found is not node and memory.can_merge(node, found):
            instead[node] = found
            memory.merge(node, found)
    return program.rebuilt(instead=instead) if instead else program


def _frozen(item: Any, instead: dict[fx.Node, fx.Node]) -> Any:
    """An argument as something that equals another one only if an op cannot tell them apart: 1 is not 1.0."""
    match item:
        case fx.Node():
            return instead.get(item, item)
        case list() | tuple():
            return type(item), *(_frozen(entry, instead) for entry in item)
        case dict():
            return tuple((key, _frozen(entry, instead)) for key, entry in item.items())
        case slice():
            return slice, *(_frozen(entry, instead) for entry in (item.start, item.stop, item.step))
    return exactly(item)
