"""Common subexpression elimination."""

from __future__ import annotations

from typing import Any

from torch import fx

from monograph.ir.meta import compute_nodes, computed_by, grad_mode
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

    def same(node: fx.Node) -> fx.Node:
        return instead.get(node, node)

    for node in compute_nodes(program.graph):
        if not is_pure(node):
            continue
        found = first.setdefault((*computed_by(node, same), grad_mode(node)), node)
        if found is not node and memory.can_merge(node, found):
            instead[node] = found
            memory.merge(node, found)
    return program.rebuilt(instead=instead) if instead else program
