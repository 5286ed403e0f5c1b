"""The update of a fused optimizer as several of the same, so that it need not wait for the last gradient."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from monograph.compat.ops import named_arguments
from monograph.ir.meta import form, set_value, value
from monograph.ir.ops.fused import GRADIENTS, IN_PLACE, has_scaler
from monograph.ir.program import Program


def fused_in_groups(program: Program, most_bytes: int) -> Program:
    """Write `fused_adamw([a, b], ...)` as one for `a` and one for `b`, in the order in which gradients are there.

    A group has gradients of at most so many bytes, or a single one. Each tensor is updated by itself: the bits are the same.
    """
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    groups = {
        node: found for node in order if (found := _groups(node, order.__getitem__, most_bytes)) is not None
    }
    if not groups:
        return program
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    made: dict[fx.Node, list[tuple[fx.Node, Sequence[int]]]] = {}
    for node in order:
        if node in groups:
            made[node] = [(_part(graph, node, group, new), group) for group in groups[node]]
        elif node.target is operator.getitem and node.args[0] in made:
            continue  # a list of results
        elif (result := _result_of(node, made)) is not None:
            new[node] = _taken(graph, node, *result)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    return program.with_graph(graph)


def _groups(node: fx.Node, place: Callable[[fx.Node], int], most_bytes: int) -> list[list[int]] | None:
    """The positions in the lists of an update that belong together; None where there is nothing to take apart."""
    if node.target not in IN_PLACE or has_scaler(node) or not _is_taken_apart(node):
        return None
    gradients: Sequence[fx.Node] = named_arguments(node.target, node.args, node.kwargs)[GRADIENTS]
    groups: list[list[int]] = []
    held = 0
    for index in sorted(range(len(gradients)), key=lambda index: place(gradients[index])):
        described = form(gradients[index])
        nbytes = 0 if described is None else described.nbytes
        if not groups or held + nbytes > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += nbytes
    return groups if len(groups) > 1 else None


def _is_taken_apart(node: fx.Node) -> bool:
    """True if of the results only single tensors are read."""
    readers = [node.users, *(item.users for item in node.users)]
    return all(user.target is operator.getitem for users in readers for user in users)


def _part(graph: fx.Graph, node: fx.Node, group: Sequence[int], new: dict[fx.Node, fx.Node]) -> fx.Node:
    """The update of some of the tensors."""
    count = len(named_arguments(node.target, node.args, node.kwargs)[GRADIENTS])

    def some(item: Any) -> Any:
        is_list = isinstance(item, (list, tuple)) and len(item) == count
        return [item[index] for index in group] if is_list else item

    args, kwargs = tuple(map(some, node.args)), {name: some(item) for name, item in node.kwargs.items()}
    target: Any = node.target
    made = graph.call_function(target, *fx.map_arg((args, kwargs), new.__getitem__))
    made.meta = dict(node.meta)
    described: Any = value(node)
    set_value(made, tuple(tuple(some(items)) for items in described))
    return made


def _result_of(
    node: fx.Node, made: dict[fx.Node, list[tuple[fx.Node, Sequence[int]]]]
) -> tuple[fx.Node, int, int] | None:
    """The part that has a result, and where: in which list, and at which place."""
    items = node.args[0] if node.target is operator.getitem else None
    if not isinstance(items, fx.Node) or items.target is not operator.getitem or items.args[0] not in made:
        return None
    index: Any = node.args[1]
    for part, group in made[items.args[0]]:  # type: ignore[index]
        if index in group:
            return part, items.args[1], group.index(index)  # type: ignore[return-value]
    return None


def _taken(graph: fx.Graph, node: fx.Node, part: fx.Node, which: int, index: int) -> fx.Node:
    items = graph.call_function(operator.getitem, (part, which))
    items.meta = dict(part.meta)
    described: Any = value(part)
    set_value(items, described[which])
    made = graph.call_function(operator.getitem, (items, index))
    made.meta = dict(node.meta)
    return made
