"""Whole values that were gathered for forward are let go, and gathered once more for backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import fx

from monograph.distributed.programs.begun import GATHER, MOVES, Begun, Ready, begun_by, unpacked, unpacks
from monograph.distributed.programs.collectives import awaited_by
from monograph.ir.meta import compute_nodes, computed_by, labels, origin, set_origin

AGAIN: Final = "gathered again for backward"  # the label of such a gather


def gather_again(graph: fx.Graph) -> None:
    """Repeat the gathers that say so, where others come between the last read in forward and the first in backward."""
    found = [item for node in graph.nodes if (item := begun_by(node)) is not None and item.op is GATHER]
    for item in found:
        if AGAIN in labels(item.begin):
            _repeat(graph, item, [other for other in found if other is not item])


def _repeat(graph: fx.Graph, item: Begun, others: Sequence[Begun]) -> None:
    ready = Ready(graph)
    place = ready.place
    shown = unpacked(item.wait)
    inside = set(shown)
    readers = [reader for node in shown for reader in node.users if reader not in inside]
    late = {reader for reader in readers if origin(reader).phase == "backward"}
    early = [place[reader] for reader in readers if reader not in late]
    if not late or not early:
        return
    first = min(late, key=place.__getitem__)
    if not any(
        max(early) < place[other.wait] < place[first] or max(early) < place[other.begin] < place[first]
        for other in others
    ):
        return  # it would be gathered at once
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in (*ready.sent_by(item.begin), item.begin, *sorted(shown, key=place.__getitem__)):
            copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
            set_origin(copies[node], replace(origin(node), phase="backward"))
    for reader in late:
        reader.args = fx.map_arg(reader.args, lambda source: copies.get(source, source))
        reader.kwargs = fx.map_arg(reader.kwargs, lambda source: copies.get(source, source))
    _erase_unread(graph, [*shown, *copies.values()])


def _erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in sorted(nodes, key=place.__getitem__, reverse=True):
        if not node.users and unpacks(node):
            graph.erase_node(node)


def gathered_twice(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """What was gathered for forward, with all that shows it, each with the node that has the same value for backward."""
    found: dict[fx.Node, fx.Node] = {}
    if not graph.find_nodes(op="call_function", target=GATHER):
        return found
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    gathered = set[fx.Node]()
    for node in compute_nodes(graph):
        inputs = node.all_input_nodes
        is_gather, is_shown = node.target is GATHER, not gathered.isdisjoint(inputs)
        if not (is_gather or node.target in MOVES or (is_shown and (unpacks(node) or awaited_by(node)))):
            continue
        if is_gather or is_shown:
            gathered.add(node)
        key = computed_by(node, lambda source: same.get(source, source))
        same[node] = first.setdefault(key, node)
        if node in gathered and same[node] is not node and origin(node).phase == "backward":
            found[same[node]] = node
    return found
