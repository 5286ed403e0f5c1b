"""The ops of a program that only serve the updates of optimizers and averages."""

from __future__ import annotations

from torch import fx

from monograph.ir.meta import origin
from monograph.passes.effects import is_pure

# what follows backward(): unscaling and clipping of gradients, too
_PHASES = ("scale", "clip", "update", "average")


def update_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Pure ops of the updates that nothing but updates and results reads, in order. They may run at any later time."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _updates(node) and all(reader in found or reader.op == "output" for reader in node.users):
            found.add(node)
    return [node for node in graph.nodes if node in found]


def _updates(node: fx.Node) -> bool:
    return origin(node).phase in _PHASES and is_pure(node)
