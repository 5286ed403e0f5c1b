"""Fused updates that may write in place: all that they give is the next state, and nothing reads the old one after them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from monograph.compat.ops import named_arguments
from monograph.ir.memory import marked_names
from monograph.ir.meta import compute_nodes, form, output_nodes
from monograph.ir.ops.fused import GRADIENTS, IN_PLACE, has_scaler
from monograph.ir.program import Program
from monograph.plan.alias import Aliases

_COPY = torch.ops.aten.copy.default


@dataclass(frozen=True)
class FusedUpdate:
    """An op that updates lists of tensors, each of which may stay where it is.

    `into` has for each result the tensor that it may be written into: state, for the outputs at `positions`, or what an op before
    has made for this one. `taken` are the ops that take the results apart, as single ones and as copies of them.
    """

    node: fx.Node
    into: Mapping[fx.Node, fx.Node]
    positions: frozenset[int]
    taken: tuple[fx.Node, ...]


def fused_updates(program: Program, state: Mapping[int, fx.Node], memory: Aliases) -> Iterator[FusedUpdate]:
    """Those that give nothing but outputs, of which some replace the `state` at their positions."""
    for node in compute_nodes(program.graph):
        if node.target in IN_PLACE and not has_scaler(node):
            given = named_arguments(node.target, node.args, node.kwargs)
            lists = {name: given[name] for name in marked_names(IN_PLACE[node.target], writes=True)}
            found = _followed(node, lists, program.graph, state, memory)
            if found is not None and _is_apart(found, memory):
                yield found


def _followed(
    node: fx.Node,
    lists: Mapping[str, Sequence[fx.Node]],
    graph: fx.Graph,
    state: Mapping[int, fx.Node],
    memory: Aliases,
) -> FusedUpdate | None:
    """The update, if it gives all that it changes in these lists, and nothing else."""
    outputs = output_nodes(graph)
    positions = {outputs[index]: index for index in state}
    into: dict[fx.Node, fx.Node] = {}
    taken: list[fx.Node] = []
    replaced: set[int] = set()
    for result in node.users:
        items = list(lists.values())[result.args[1]] if result.target is operator.getitem else []  # type: ignore[index]
        for item in result.users:
            if item.target is not operator.getitem or not items:
                return None
            old = items[item.args[1]]  # type: ignore[index]
            new = next((reader for reader in item.users if _is_copy(reader, old, item)), item)
            place = positions.get(new)
            if place is not None and state[place] is old:
                replaced.add(place)
            elif not _is_made_for(node, new, old, memory):
                return None
            if item.users.keys() - {new} or new.users.keys() != {graph.output_node()}:
                return None
            into[new] = old
            taken += (result, item, new)
    changed = [item for name, items in lists.items() if name != GRADIENTS for item in items]
    if not replaced or Counter(into.values()) != Counter(changed):
        return None
    return FusedUpdate(node, into, frozenset(replaced), tuple(dict.fromkeys(taken)))


def _is_copy(node: fx.Node, old: fx.Node, new: fx.Node) -> bool:
    """True for a copy that has the strides of the new value."""
    return node.target is _COPY and node.args == (old, new) and form(new) == form(old)


def _is_made_for(node: fx.Node, new: fx.Node, old: fx.Node, memory: Aliases) -> bool:
    """True if an op has made the old value, and only this node and what its result is read by read it."""
    own = {shown.maker for shown in memory.possible[old.name]}
    return old.op == "call_function" and own == {old.name} and old.users.keys() <= {node, new}


def _is_apart(update: FusedUpdate, memory: Aliases) -> bool:
    """True if no tensor that it writes shares memory with another one that it is given."""
    shown = [memory.possible[item.name] for item in update.node.all_input_nodes]
    count = Counter(storage for storages in shown for storage in storages)
    return all(count[storage] == 1 for item in update.into.values() for storage in memory.possible[item.name])
