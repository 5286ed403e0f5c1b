"""Dead code elimination."""

from __future__ import annotations

from torch import fx

from monograph.ir.program import Program
from monograph.passes.effects import acts


def dce(program: Program) -> Program:
    """Drop ops whose results nothing reads.

    Random ops stay, since they move the generator as in eager mode, and so do ops that check values.
    """
    live: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        droppable = node.op in ("call_function", "get_attr") and not acts(node)
        if not droppable or not live.isdisjoint(node.users):
            live.add(node)
    if len(live) == len(program.graph.nodes):
        return program
    return program.rebuilt(node for node in program.graph.nodes if node in live)
