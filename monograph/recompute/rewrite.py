"""A program with copies of ops: what is dropped is computed again where a schedule has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Final

from torch import fx

from monograph.distributed.programs.gather_again import gathered_twice
from monograph.ir.meta import computes, origin, set_origin
from monograph.ir.program import Program
from monograph.passes.dce import dce
from monograph.plan.alias import aliases
from monograph.recompute.problem import Unit

_SUFFIX: Final = "_again"


def rewritten(program: Program, units: Sequence[Unit], again: Sequence[tuple[int, int]]) -> Program:
    """The program in which units run again, each right before the op at its place. Its results have the same bits."""
    if not again:
        return program
    places: dict[int, list[Unit]] = {}
    for place, index in again:
        places.setdefault(place, []).append(units[index])
    copying = _Copying(aliases(program).views, places, gathered_twice(program.graph))
    return dce(program.with_graph(copying.copied(program.graph)))


class _Copying:
    """Copies a graph node by node. `_now` has for each value the node that has it at the moment, the latest copy.

    `twins` are values that were gathered again: what runs again reads those, so that the others may be gone.
    """

    def __init__(
        self,
        views: frozenset[str],
        places: Mapping[int, Sequence[Unit]],
        twins: Mapping[fx.Node, fx.Node],
    ) -> None:
        self._views, self._places, self._twins = views, places, twins
        self._items = {item for units in places.values() for unit in units for item in unit.items}
        self._now: dict[fx.Node, fx.Node] = {}
        self._early: set[fx.Node] = set()  # made with their units, before the program comes to them
        self._graph = fx.Graph()

    def copied(self, graph: fx.Graph) -> fx.Graph:
        """The whole graph."""
        position = -1
        for node in graph.nodes:
            if computes(node):
                position += 1
                for unit in self._places.get(position, ()):
                    self._run_again(unit)
            if node not in self._early:
                self._now[node] = self._graph.node_copy(node, self._value)
        return self._graph

    def _run_again(self, unit: Unit) -> None:
        copy = self._again(unit.node)
        if len(unit.own) == len(unit.dropped):
            self._now[unit.node] = copy
        for item in unit.items:
            if item not in self._now:
                self._early.add(item)
            self._now[item] = self._again(item, {unit.node: copy})

    def _value(self, node: fx.Node) -> fx.Node:
        """What has the value of a node at the moment; a view of what has been computed again is made again."""
        if node.name in self._views and not (node.target is getitem and node in self._items):
            wanted = [self._value(item) for item in node.all_input_nodes]
            if self._now[node].all_input_nodes != wanted:
                self._now[node] = self._again(node)
        return self._now[node]

    def _late_value(self, node: fx.Node) -> fx.Node:
        """The same for what runs again; a view of what was gathered again may be there of what was gathered first alone."""
        if not self._is_there_twice(node):
            return self._value(node)
        twin = self._twins.get(node)
        return self._again(node) if twin is None else self._now[twin]

    def _is_there_twice(self, node: fx.Node) -> bool:
        if node in self._twins:
            return self._twins[node] in self._now
        return node.name in self._views and any(map(self._is_there_twice, node.all_input_nodes))

    def _again(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        known = instead or {}
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda item: known.get(item) or self._late_value(item)
        )
        copy = self._graph.create_node(node.op, node.target, args, kwargs, f"{node.name}{_SUFFIX}")
        copy.meta.update(node.meta)
        set_origin(copy, replace(origin(node), again=True))
        return copy
