"""Dead code elimination."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from monograph._torch import has_effect, is_random
from monograph.ir.program import Program


def dce(program: Program) -> Program:
    """Drop ops whose results nothing reads.

    Random ops stay, since they move the generator as in eager mode, and so do ops that check values.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    _keep_meta(program.graph, graph)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not _acts(node.target):
            graph.erase_node(node)
    return replace(program, module=fx.GraphModule(program.module, graph))


def _acts(target: Any) -> bool:
    return is_random(target) or has_effect(target)


def _keep_meta(source: fx.Graph, target: fx.Graph) -> None:
    """Graph copies share `meta` dicts with their source; give the copy its own."""
    for node in target.nodes:
        node.meta = dict(node.meta)
