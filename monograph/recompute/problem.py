"""What can be dropped in a program: ops that can run again, who reads what they make, and how long that is held."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem
from typing import Final

import numpy as np
import torch
from torch import fx

from monograph.compat.ops import (
    OpOverload,
    aliased_arguments,
    is_custom,
    is_random,
    named_arguments,
    packet_name,
    schema_arguments,
)
from monograph.distributed.programs.collectives import begins_collective, read_by
from monograph.distributed.programs.gather_again import gathered_twice
from monograph.ir.memory import changed_by
from monograph.ir.meta import computes, origin
from monograph.ir.program import Program
from monograph.passes.effects import is_pure
from monograph.plan.alias import Aliases, Shown, aliases
from monograph.plan.in_place import in_place
from monograph.plan.layouts import certain_layouts
from monograph.plan.overwrite import sources_of

_FORWARD: Final = "forward"
# ops whose results hold what was in memory before, and ops that may add up in the order in which threads come to it
_NEVER_AGAIN: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
        *(
            "scatter_add",
            "scatter_reduce",
            "index_add",
            "index_reduce",
            "index_put",
            "put",
            "bincount",
            "histc",
        ),
    )
)
_MARK: Final = getattr(torch.Tag, "nondeterministic_bitwise", None)  # of torch 2.13 on
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Unit:
    """An op of forward that can run again: it is dropped with all that it makes, or kept.

    `own` are the storages that it makes, `dropped` those of them that do not leave the program, `reads` those that it
    reads; `items` are the nodes that take single results out of several, of those that are dropped. `late` is when backward
    reads what is dropped for the first time; after the last op if it does not. One that `stays` runs in forward even if only
    backward needs it.
    """

    node: fx.Node
    position: int
    own: tuple[int, ...]
    dropped: tuple[int, ...]
    reads: tuple[int, ...]
    items: tuple[fx.Node, ...]
    late: int
    stays: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """New state in the storage `new`: it is written into that of the old state once nothing reads that any more."""

    new: int
    old: int


@dataclass(frozen=True)
class Problem:
    """The ops of a program in their order, at positions from 0 on; what it returns is read at the position `steps`.

    Storages have numbers. Those of inputs, and of new state, take no bytes of the program. A storage is held from
    `births` to `ends`, the position of its last reader. `readers` has for each the positions of its readers, in order, with
    the units that these are, or -1; `unit_of` the unit that drops it, or -1. `forced` are the units that are dropped in any
    case: those in regions of activation checkpointing, but for what forward reads outside of its region. `inside` are bytes that
    the op at a position holds while it runs, besides what it makes; `over` has positions of ops with a storage that each may
    write its result over, if it is the last reader. `twins` has storages with another one that holds the same for backward, and the
    position from which on it does: what runs again later reads that one.
    """

    steps: int
    units: tuple[Unit, ...]
    nbytes: Numbers
    births: Numbers
    ends: Numbers
    readers: tuple[tuple[tuple[int, int], ...], ...]
    unit_of: tuple[int, ...]
    forced: frozenset[int]
    renewed: tuple[Renewed, ...]
    renewed_nbytes: Mapping[int, int]
    inside: Mapping[int, int]
    over: tuple[tuple[int, int], ...]
    twins: Mapping[int, tuple[int, int]]

    def read_at(self, item: int, place: int) -> int:
        """The storage that a unit reads in place of this one if it runs again at a place."""
        twin, there = self.twins.get(item, (item, place))
        return twin if there < place else item

    @cached_property
    def useful(self) -> tuple[int, ...]:
        """The units that backward reads, and those that have to run again for them if they are dropped themselves."""
        needed, found = set[int](), []
        for index in reversed(range(len(self.units))):
            unit = self.units[index]
            if unit.late < self.steps or index in needed:
                found.append(index)
                needed.update(self.unit_of[item] for item in unit.reads)
        return tuple(reversed(found))


def problem_of(
    program: Program,
    inside: Mapping[str, int] | None = None,
    may_run_again: Callable[[fx.Node], bool] = lambda _node: True,
) -> Problem:
    """The problem of a program. `inside` has the bytes that its parts hold while they run, by their names.

    `may_run_again` chooses the ops that are worth it; those in regions of activation checkpointing may in any case.
    """
    return _Reading(program, inside or {}, may_run_again).problem()


class _Reading:
    """Gives numbers to the storages of a program, and looks at who reads them."""

    def __init__(
        self, program: Program, inside: Mapping[str, int], may_run_again: Callable[[fx.Node], bool]
    ) -> None:
        self.program, self.inside, self.may_run_again = program, inside, may_run_again
        self.memory: Aliases = aliases(program)
        self.nodes = [node for node in program.graph.nodes if computes(node)]
        self.made: dict[fx.Node, tuple[int, ...]] = {}
        self.number: dict[object, int] = {}
        nbytes, births = list[int](), list[int]()
        position = -1
        for node in program.graph.nodes:
            computed = computes(node)
            position += computed
            if node.op == "output":
                continue
            own = [storage for storage in self.memory.certain[node.name] if storage.maker == node.name]
            first = len(self.number)
            for storage in sorted(own, key=lambda item: item.index):
                self.number[storage] = len(self.number)
                nbytes.append(storage.nbytes if computed else 0)
                births.append(max(position, 0))
            self.made[node] = tuple(range(first, len(self.number)))
        self.births = np.array(births, np.int64)
        self.nbytes = np.array(nbytes, np.int64)

    def problem(self) -> Problem:
        """Put it together."""
        steps, graph = len(self.nodes), self.program.graph
        leaving = {item for node in graph.output_node().all_input_nodes for item in self._shown(node)}
        reads = {node: tuple(dict.fromkeys(self._read_by(node))) for node in self.nodes}
        units = [
            self._unit(node, position, leaving, reads[node])
            for position, node in enumerate(self.nodes)
            if self._can_run_again(node, leaving)
        ]
        own = {unit.node: index for index, unit in enumerate(units)}
        unit_of = [-1] * len(self.number)
        for index, unit in enumerate(units):
            for item in unit.dropped:
                unit_of[item] = index
        readers: list[list[tuple[int, int]]] = [[] for _ in self.number]
        late, forced = (
            [steps + 1] * len(units),
            {i for i, unit in enumerate(units) if origin(unit.node).region},
        )
        for position, node in enumerate(self.nodes):
            place = origin(node)
            for item in reads[node]:
                readers[item].append((position, own.get(node, -1)))
                if (index := unit_of[item]) < 0:
                    continue
                if place.phase != _FORWARD:
                    late[index] = min(late[index], position)
                elif place.region != origin(units[index].node).region:
                    forced.discard(index)
        for item in leaving:
            readers[item].append((steps, -1))
        ends = [found[-1][0] if found else int(self.births[item]) for item, found in enumerate(readers)]
        renewed, over = tuple(self._renewed()), tuple(self._overwritable())
        held = {item.new: int(self.nbytes[item.new]) for item in renewed}
        self.nbytes[list(held)] = 0
        self.nbytes[list(self._on_the_way(held, over, ends))] = 0
        return Problem(
            steps,
            tuple(replace(unit, late=late[index]) for index, unit in enumerate(units)),
            self.nbytes,
            self.births,
            np.maximum(np.array(ends, np.int64), self.births),
            tuple(map(tuple, readers)),
            tuple(unit_of),
            frozenset(forced),
            renewed,
            held,
            dict(self._held_inside()),
            over,
            dict(self._twins()),
        )

    def _shown(self, node: fx.Node) -> Iterator[int]:
        return (self.number[storage] for storage in self.memory.certain[node.name])

    def _read_by(self, node: fx.Node) -> Iterator[int]:
        """What a node reads; to make a view is no read. Of an input, what may be a view of it counts."""
        if node.name in self.memory.views:
            return
        for needed in read_by(node):
            yield from self._shown(needed)
            for storage in self.memory.possible[needed.name] - self.memory.certain[needed.name]:
                yield self.number[storage]

    def _can_run_again(self, node: fx.Node, leaving: Iterable[int]) -> bool:
        if origin(node).phase != _FORWARD or not isinstance(node.target, OpOverload):
            return False
        if not (is_pure(node) or _draws_nothing(node)) or aliased_arguments(node.target) is None:
            return False
        if changed_by(node):  # running statistics, which would move twice
            return False
        if not origin(node).region and not self.may_run_again(node):
            return False
        if packet_name(node.target) in _NEVER_AGAIN or _MARK in node.target.tags:
            return False
        return any(item not in leaving for item in self.made[node])

    def _unit(self, node: fx.Node, position: int, leaving: Iterable[int], reads: tuple[int, ...]) -> Unit:
        own = self.made[node]
        items = [
            item
            for item in node.users
            if item.target is getitem and not any(shown in leaving for shown in self._shown(item))
        ]
        dropped = tuple(item for item in own if item not in leaving)
        return Unit(node, position, own, dropped, reads, tuple(items), 0, stays=not is_pure(node))

    def _renewed(self) -> Iterator[Renewed]:
        for index, place in in_place(self.program, self.memory).items():
            form = self.memory.outputs[index]
            (old,) = self.memory.certain[place.input]
            if isinstance(form, Shown) and len(form.certain) == 1:
                (new,) = form.certain
                yield Renewed(self.number[new], self.number[old])

    def _overwritable(self) -> Iterator[tuple[int, int]]:
        makers = {node.name: node for node in self.program.graph.nodes}
        sure = certain_layouts(self.program.graph)
        for position, node in enumerate(self.nodes):
            for source in sources_of(node, self.memory, makers, sure):
                (storage,) = self._shown(source)
                yield position, storage

    def _on_the_way(
        self, new: Container[int], over: Sequence[tuple[int, int]], ends: Sequence[int]
    ) -> Iterator[int]:
        """What becomes new state op by op, each over its first argument: that is the memory of the old state from the first one on."""
        found: set[int] = set()
        for position, item in reversed(over):
            node = self.nodes[position]
            (made,) = self.made[node]
            is_first = isinstance(node.args[0], fx.Node) and item in self._shown(node.args[0])
            if is_first and ends[item] == position and (made in new or made in found):
                found.add(item)
                yield item

    def _twins(self) -> Iterator[tuple[int, tuple[int, int]]]:
        place = {node: position for position, node in enumerate(self.nodes)}
        twice = gathered_twice(self.program.graph)
        for node in reversed(twice):  # so that of what shows a storage the first counts
            if not begins_collective(node):  # until it is awaited nothing can be read
                twin = twice[node]
                pairs = zip(self._shown(node), self._shown(twin), strict=True)
                yield from ((item, (other, place[twin])) for item, other in pairs)

    def _held_inside(self) -> Iterator[tuple[int, int]]:
        """What parts hold while they run, more than what they make."""
        for position, node in enumerate(self.nodes):
            if node.op == "call_module" and (held := self.inside.get(str(node.target), 0)):
                made = sum(int(self.nbytes[item]) for item in self.made[node])
                if held > made:
                    yield position, held - made


def _draws_nothing(node: fx.Node) -> bool:
    """True for attention that drops nothing: its op is marked as random."""
    if not is_random(node.target) or is_custom(node.target):
        return False
    given = {item.name: item.default for item in schema_arguments(node.target)}
    given |= named_arguments(node.target, node.args, node.kwargs)
    return given.get("dropout_p") == 0.0
