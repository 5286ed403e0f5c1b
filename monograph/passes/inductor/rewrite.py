"""What passes share that write single ops by others in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

from torch import fx

from monograph.ir.evaluate import fill_meta
from monograph.ir.meta import compute_nodes, origin, set_origin, set_value, value
from monograph.ir.program import Program


def rewritten(
    program: Program, applies: Callable[[fx.Node], bool], write: Callable[[fx.Node], None]
) -> Program:
    """A program in which `write` has put others in the place of the ops that a pass `applies` to; itself if there are none."""
    if not any(map(applies, compute_nodes(program.graph))):
        return program
    program = program.rebuilt()
    for node in list(filter(applies, compute_nodes(program.graph))):
        write(node)
    fill_meta(program.graph)
    return program


def calls_like(node: fx.Node) -> Callable[..., fx.Node]:
    """What adds a call of an op to the graph of a node, with its origin."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        result = node.graph.call_function(target, args, kwargs)
        set_origin(result, origin(node))
        return result

    return call


def put_in_place(result: fx.Node, node: fx.Node) -> None:
    """Let a result be what a node was, which is still in the graph."""
    set_value(result, value(node))  # the next one that is written may take it
    node.replace_all_uses_with(result)


def put_results(node: fx.Node, results: Mapping[int, Callable[[], fx.Node]]) -> None:
    """Put results in the place of those of a node that are used."""
    for user in list(node.users):
        place = user.args[1] if user.target is getitem else None
        if isinstance(place, int) and place in results:
            if user.users:
                put_in_place(results[place](), user)
            node.graph.erase_node(user)
