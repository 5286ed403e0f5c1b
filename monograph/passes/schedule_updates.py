"""Updates run as soon as their gradients are there."""

from __future__ import annotations

from torch import fx

from monograph.ir.program import Program
from monograph.passes.updates import update_nodes


def schedule_updates(program: Program) -> Program:
    """Move the ops of each update right after the last op that it needs, so that gradients die young.

    Ops that an update needs from state alone move with it. All other ops keep their order.
    """
    nodes = list(program.graph.nodes)
    moved = update_nodes(program.graph)
    if not moved:
        return program
    place = _places(nodes, moved)
    late = set(moved)
    order = sorted(nodes, key=lambda node: (place[node], node in late))  # a stable sort keeps the rest
    return program if order == nodes else program.rebuilt(order)


def _places(nodes: list[fx.Node], moved: list[fx.Node]) -> dict[fx.Node, int]:
    """For each node the position after which it runs: an update after the last computed value that it depends on."""
    place = {node: index for index, node in enumerate(nodes)}
    computed = {node: node.op not in ("placeholder", "get_attr") for node in nodes}
    stands = dict.fromkeys(moved, -1)
    for node in moved:
        needed = [
            stands[item] if item in stands else place[item] for item in node.all_input_nodes if computed[item]
        ]
        stands[node] = max(needed, default=-1)
    for node in reversed(moved):
        if stands[node] < 0:  # on state and numbers alone: with the first op that reads it
            readers = [stands[item] for item in node.users if item in stands]
            stands[node] = min((at for at in readers if at >= 0), default=place[node])
    return place | stands
