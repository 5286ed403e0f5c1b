"""No sum over some processes, and no number of a single one, is taken for that of all when the state is renewed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates, waits
from monograph.compat.ops import named_arguments, packet_name
from monograph.distributed.programs.collectives import awaited_by, begins_collective
from monograph.errors import DistributedError
from monograph.ir.memory import is_view
from monograph.ir.meta import computes, metas, origin, output_nodes, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program

_NONE: Final = frozenset[str]()
_aten = torch.ops.aten
_COPY: Final = _aten.copy.default
_SLICE, _CAT, _EXPAND = _aten.slice.Tensor, _aten.cat.default, _aten.expand.default
_SAME_ORDER: Final = (_aten.view.default, _aten.mul.Tensor)
_KEPT_ALIKE: Final = (Role.PARAM, Role.OPTIM, Role.EMA, Role.SCALER)
_SUMS: Final = ("all_reduce", "all_reduce_coalesced")
_SCATTERS: Final = ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
_GATHERS: Final = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")


@dataclass(frozen=True)
class Known:
    """What is known of a value, by names of groups.

    `joined` are those over which what comes of this rank's own batch was put together, None if nothing does. The value is one
    part of several over the groups `parts`, and lacks what ranks of the groups `lacks` have.
    """

    joined: frozenset[str] | None = None
    parts: frozenset[str] = _NONE
    lacks: frozenset[str] = _NONE

    def __or__(self, other: Known) -> Known:
        both = [item.joined for item in (self, other) if item.joined is not None]
        joined = reduce(frozenset.intersection, both) if both else None
        return Known(joined, self.parts | other.parts, self.lacks | other.lacks)


Several = Known | tuple[Any, ...]  # of an op with several results one for each
Fact = tuple[Known, int]  # of a value of so many elements


def check_awaited(program: Program) -> None:
    """Raise DistributedError if a collective is read before it is done, or if nothing waits for it."""
    for part in program.programs:
        for node in part.graph.nodes:
            if computes(node) and waits(node.target) and awaited_by(node) is None:
                raise DistributedError(f"{node.name} waits for what no collective makes", where=origin(node))
            if computes(node) and begins_collective(node):
                _check_readers(node)


def _check_readers(begun: fx.Node) -> None:
    pending, is_awaited = [begun], False
    while pending:
        for reader in pending.pop().users:
            if reader.op == "call_function" and waits(reader.target):
                is_awaited = True
            elif reader.op == "call_function" and reader.target is getitem:
                pending.append(reader)
            else:
                raise DistributedError(
                    f"{reader.name} reads {begun.name} before the collective is done: part of it may be there",
                    where=origin(reader),
                    hint="read what wait_tensor gives",
                )
    if not is_awaited:
        raise DistributedError(f"nothing waits for {begun.name}, a collective", where=origin(begun))


def check_whole(
    program: Program,
    parts: Mapping[str, frozenset[str]],
    covers: Callable[[frozenset[str]], bool],
    alone: Collection[str] = (),
) -> None:
    """Raise DistributedError if new state comes of a batch, or of a part, that other ranks have otherwise.

    `parts` has by path the state of which ranks hold parts, and over which groups. `covers` says if what is put together over
    groups comes of all batches. Groups that are `alone` have one rank.
    """
    parts = {path: groups.difference(alone) for path, groups in parts.items()}
    given = [_of_input(port, parts) for port in program.inputs]
    roles = {port.path: port.role for port in program.inputs}
    results = _Reading(program, frozenset(alone)).results(given)
    for index, (port, known) in enumerate(zip(program.outputs, results, strict=True)):
        if port.role is not Role.STATE or roles.get(port.path) not in _KEPT_ALIKE:
            continue
        if what := _fault(_one(known), parts.get(port.path, _NONE), covers):
            made = output_nodes(program.graph)[index]
            raise DistributedError(
                f"the new {port.path} {what}",
                where=origin(made) if isinstance(made, fx.Node) else None,
                hint="what leads to it has to be summed or gathered over all ranks first",
            )


def _fault(known: Known, parts: frozenset[str], covers: Callable[[frozenset[str]], bool]) -> str:
    if known.joined is not None and not covers(known.joined):
        over = (
            f"put together over {', '.join(sorted(known.joined))} alone" if known.joined else "never reduced"
        )
        return f"comes of the batches of some ranks: {over}"
    if known.lacks:
        return f"reads a number of one part as that of all: it was never reduced over {', '.join(sorted(known.lacks))}"
    if more := known.parts - parts:
        return f"is one part of several over {', '.join(sorted(more))}, and all ranks hold it whole"
    return ""


def _of_input(port: Port, parts: Mapping[str, frozenset[str]]) -> Known:
    return Known(_NONE if port.role is Role.USER else None, parts.get(port.path, _NONE))


def _one(known: Several) -> Known:
    """What is known of all that an op makes."""
    return known if isinstance(known, Known) else reduce(Known.__or__, map(_one, known), Known())


class _Reading:
    """Follows what is known of values through a program."""

    def __init__(self, program: Program, alone: frozenset[str]) -> None:
        self._program, self._alone = program, alone
        self._parts = {part.name: _Reading(part, alone) for part in program.parts}
        self._seen: dict[tuple[Known, ...], list[Several]] = {}

    def results(self, given: Sequence[Several]) -> list[Several]:
        """What is known of the outputs, if this is known of the inputs."""
        key = tuple(map(_one, given))
        if key not in self._seen:
            self._seen[key] = self._read(given)
        return self._seen[key]

    def _read(self, given: Sequence[Several]) -> list[Several]:
        inputs = iter(given)
        known: dict[fx.Node, Several] = {}
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(inputs)
            elif node.op == "call_module" and str(node.target) in self._parts:
                arguments = [
                    known.get(item, Known()) if isinstance(item, fx.Node) else Known() for item in node.args
                ]
                known[node] = tuple(self._parts[str(node.target)].results(arguments))
            elif computes(node):
                known[node] = _made(node, known, self._alone)
        return [
            known.get(item, Known()) if isinstance(item, fx.Node) else Known()
            for item in output_nodes(self._program.graph)
        ]


def _made(node: fx.Node, known: Mapping[fx.Node, Several], alone: frozenset[str]) -> Several:
    if node.target is getitem:
        source: Any = known[node.args[0]]  # type: ignore[index]
        return source if isinstance(source, Known) else source[node.args[1]]
    if communicates(node.target) and not waits(node.target):
        return _communicated(node, _all_of(node.all_input_nodes, known), alone)
    if node.target is _SLICE and (summed := _summed_beside_parts(node)) is not None:
        begun, given = summed
        return _communicated(begun, _one(known[given]), alone, _SUMS[0])
    if node.target is _COPY:  # nothing is left of what it is written over
        return known[node.args[1]]  # type: ignore[index]
    described = value(node)
    if not isinstance(described, tuple):
        return _reduced(node, described, known)
    return _listed(node, described, known)


def _summed_beside_parts(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The collective that a slice is taken from, and what is added there, if that is a sum to which both ranks give the same row for both.

    None for any other slice, also of a scattered sum: of more than two ranks each adds in another order.
    """
    begun = awaited_by(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if begun is None or packet_name(begun.target).partition("::")[2] not in _SCATTERS:
        return None
    flat: Any = begun.args[0]
    while isinstance(flat, fx.Node) and flat.target in _SAME_ORDER:
        flat = flat.args[0]
    if (
        not isinstance(flat, fx.Node)
        or flat.target is not _CAT
        or flat.args[1:] != (1,)
        or len(node.args) < 4
    ):
        return None
    rows: Any = flat.args[0]
    (_, first, last), at = node.args[1:4], 0
    for row in rows:
        (described,) = metas(value(row))
        width = int(described.shape[1])
        if at <= first and last <= at + width:  # type: ignore[operator]
            return (begun, row.args[0]) if _repeats(row) and described.shape[0] == 2 else None
        at += width
    return None


def _repeats(row: fx.Node) -> bool:
    """True for several rows that are one and the same."""
    (given,) = metas(value(row.all_input_nodes[0]))
    return row.target is _EXPAND and int(given.shape[0]) == 1


def _listed(node: fx.Node, described: tuple[Any, ...], known: Mapping[fx.Node, Several]) -> Several:
    """Of an op on lists, what each of its results comes of: the items at its place, and what is no list."""
    arguments = [*node.args, *node.kwargs.values()]
    lengths = {len(item) for item in described if isinstance(item, tuple)} or {len(described)}
    length = max(lengths)
    if len(lengths) > 1 or all(_length(item) != length for item in arguments):
        return _all_of(node.all_input_nodes, known)
    lists = [item for item in described if isinstance(item, tuple)]
    found = []
    for place in range(length):
        given = [fact for item in arguments for fact in _facts(item, place, length, known)]
        made = tuple(item[place] for item in lists) if lists else described[place]
        found.append(_less(given, made))
    if not lists:
        return tuple(found)
    everything = [(_one(known[item]), _numel(value(item))) for item in node.all_input_nodes if item in known]
    return tuple(tuple(found) if isinstance(item, tuple) else _less(everything, item) for item in described)


def _length(item: Any) -> int:
    """The number of items in a list, or in the lists that a node makes; -1 for anything else."""
    described = value(item) if isinstance(item, fx.Node) else item
    return len(described) if isinstance(described, (list, tuple)) else -1


def _facts(item: Any, place: int, length: int, known: Mapping[fx.Node, Several]) -> Iterator[Fact]:
    """What is known of an argument, of a list of that length of what is at a place."""
    if isinstance(item, fx.Node):
        several, described = known.get(item, Known()), value(item)
        if _length(item) == length and isinstance(described, tuple):
            at_place = _one(several if isinstance(several, Known) else several[place])
            yield at_place, _numel(described[place])
        else:
            yield _one(several), _numel(described)
    elif isinstance(item, (list, tuple)):
        for inner in [item[place]] if len(item) == length else item:
            yield from _facts(inner, 0, -1, known)


def _reduced(node: fx.Node, described: Any, known: Mapping[fx.Node, Several]) -> Known:
    if is_view(node):
        return _all_of(node.all_input_nodes, known)
    return _less(
        [(_one(known[item]), _numel(value(item))) for item in node.all_input_nodes if item in known],
        described,
    )


def _less(given: Sequence[Fact], described: Any) -> Known:
    """A number that is made of many of a part lacks those of the other parts."""
    made = _numel(described)
    together = reduce(Known.__or__, (fact for fact, _ in given), Known())
    lost = [fact.parts for fact, numel in given if made < numel]
    return replace(together, lacks=together.lacks.union(*lost))


def _numel(described: Any) -> int:
    return max((math.prod(map(int, meta.shape)) for meta in metas(described)), default=0)


def _all_of(nodes: Iterable[fx.Node], known: Mapping[fx.Node, Several]) -> Known:
    return reduce(Known.__or__, (_one(known[item]) for item in nodes if item in known), Known())


def _communicated(node: fx.Node, given: Known, alone: frozenset[str], name: str = "") -> Known:
    """What is known after a collective, or after one of that name in its place."""
    name = name or packet_name(node.target).partition("::")[2]
    group = frozenset({str(named_arguments(node.target, node.args, node.kwargs)["group_name"])})
    joined = None if given.joined is None else given.joined | group
    if group <= alone:
        return replace(given, joined=joined)
    if name in (*_SUMS, *_SCATTERS) and given.joined is not None and group <= given.parts - given.joined:
        raise DistributedError(
            f"{node.name} adds what comes of other parts on each rank of the group {next(iter(group))!r}",
            where=origin(node),
            hint="gather the parts before they are computed with",
        )
    if name in _SUMS or name in _GATHERS:
        return Known(joined, given.parts - group, given.lacks - group)
    if name in _SCATTERS:
        return Known(joined, given.parts | group, given.lacks - group)
    if name == "broadcast":
        return replace(given, joined=joined)
    return given
