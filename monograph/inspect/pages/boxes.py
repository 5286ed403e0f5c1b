"""What a drawing shows: the ops of each phase as boxes, modules as boxes around them, views folded into what they are views of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from types import MappingProxyType
from typing import Final

import torch
from torch import fx

from monograph.inspect.pages.modules import amount
from monograph.ir.memory import is_view
from monograph.ir.meta import TensorMeta, metas, origin, value
from monograph.ir.ops.arithmetic import flops
from monograph.ir.port import Role
from monograph.ir.printer import call_text, short_target
from monograph.ir.program import Program
from monograph.ir.text import bytes_text, count_text

MOST: Final = 60  # boxes of a phase, unless a depth is asked for
_VIEWS: Final = (getitem, torch.ops.aten._unsafe_view.default)  # besides those that are known as views


@dataclass(frozen=True)
class Arrow:
    """From one box to another of the same frame, with the bytes that it carries."""

    start: str
    end: str
    nbytes: int


@dataclass
class Box:
    """An op, a value from outside, or a module; an open module has boxes inside."""

    name: str
    lines: list[str]
    phase: str = ""
    note: str = ""
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)

    def every(self) -> Iterator[Box]:
        """It, and all inside."""
        yield self
        for box in self.boxes:
            yield from box.every()


@dataclass(frozen=True)
class Panel:
    """One phase of a drawing."""

    phase: str
    frame: Box
    num_folded: int


def panels(
    program: Program, module: str | None, depth: int | None, kinds: Mapping[str, str] = MappingProxyType({})
) -> list[Panel]:
    """The phases of a module, or of the whole step, in their order; none if it has no ops.

    `kinds` are the names of the classes of modules, by path.
    """
    known = _Known(program, kinds)
    found: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and (module is None or origin(node).is_in(module)):
            found.setdefault(origin(node).phase, []).append(node)
    return [_panel(known, phase, nodes, module or "", depth) for phase, nodes in found.items()]


def _panel(known: _Known, phase: str, nodes: Sequence[fx.Node], module: str, depth: int | None) -> Panel:
    ops = [node for node in nodes if not is_folded(node)] or list(nodes)
    group = _Group(module, ops, known)
    _open(group, depth)
    frame = known.framed(group, phase or "step")
    frame.lines = [", ".join(filter(None, (phase, module)))] if phase or module else frame.lines
    _add_outside(frame, group, known, phase)
    return Panel(phase or "other ops", frame, len(nodes) - len(ops))


def is_folded(node: fx.Node) -> bool:
    """True for an op that computes nothing: a view, or one of several results."""
    return node.target in _VIEWS or (node.op == "call_function" and is_view(node))


# --- modules ---------------------------------------------------------------------------------------------------------


class _Group:
    """Ops of one module that may be drawn as one box: nothing that they read, of outside, depends on one of them."""

    def __init__(self, path: str, ops: list[fx.Node], known: _Known) -> None:
        self.path, self.ops, self.is_open = path, ops, False
        self._known = known

    @cached_property
    def members(self) -> frozenset[fx.Node]:
        """The ops, when all are in it."""
        return frozenset(self.ops)

    @cached_property
    def items(self) -> list[_Group | fx.Node]:
        """Ops of the module itself, and groups of those of the modules in it."""
        items: list[_Group | fx.Node] = []
        of: dict[fx.Node, int] = {}  # the item that an op is in
        before: list[set[int]] = []  # the items that an item reads
        newest: dict[str, int] = {}  # the group of a module that may grow
        for node in self.ops:
            child = _child(origin(node).module, self.path)
            read = {of[source] for source in self._known.sources(node) if source in of}
            at = newest.get(child) if child is not None else None
            if at is None or any(other != at and _depends(other, at, before) for other in read):
                at = len(items)
                items.append(node if child is None else _Group(child, [], self._known))
                before.append(set())
                if child is not None:
                    newest[child] = at
            item = items[at]
            if isinstance(item, _Group):
                item.ops.append(node)
            of[node] = at
            before[at] |= read - {at}
        return items


def _child(module: str, path: str) -> str | None:
    """The module in `path` that a module is in; None for `path` itself."""
    if module == path:
        return None
    inner = module.removeprefix(f"{path}.") if path else module
    first = inner if inner.startswith("optimizer.") else inner.partition(".")[0]
    return f"{path}.{first}" if path else first


def _depends(item: int, on: int, before: Sequence[set[int]]) -> bool:
    pending, seen = [item], {item}
    while pending:
        for other in before[pending.pop()]:
            if other == on:
                return True
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return False


def _open(group: _Group, depth: int | None) -> None:
    """Open modules level by level: to a depth, or as long as there are few boxes."""
    group.is_open = True
    level, shown, reached = [group], len(group.items), 0
    while level and (depth is None or reached < depth):
        inner = [item for found in level for item in found.items if isinstance(item, _Group)]
        level = [item for item in inner if depth is not None or len(item.items) <= MOST // 2]
        shown += sum(len(item.items) for item in level)
        if depth is None and shown > MOST:
            return
        for item in level:
            item.is_open = True
        reached += 1


# --- boxes -----------------------------------------------------------------------------------------------------------


class _Known:
    """What each op reads, past the views."""

    def __init__(self, program: Program, kinds: Mapping[str, str]) -> None:
        self._kinds = kinds
        placeholders = program.graph.find_nodes(op="placeholder")
        self.ports = dict(zip(placeholders, program.inputs, strict=True))
        self._sources: dict[fx.Node, Mapping[fx.Node, int]] = {}

    def sources(self, node: fx.Node) -> Mapping[fx.Node, int]:
        """The ops and inputs that a node reads, with the bytes."""
        if node not in self._sources:
            found: Counter[fx.Node] = Counter()
            for item in node.all_input_nodes:
                nbytes = sum(meta.nbytes for meta in metas(value(item)))
                found[self._source(item)] += nbytes
            self._sources[node] = found
        return self._sources[node]

    def _source(self, node: fx.Node) -> fx.Node:
        while is_folded(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    def framed(self, group: _Group, phase: str) -> Box:
        """An open group with what is in it."""
        frame = Box(group.path or "build()", [group.path or "build()"], phase)
        inside: dict[fx.Node, Box] = {}
        for number, item in enumerate(group.items):
            box = self._box(item, group, phase)
            box.name = f"{frame.name}/{number}"
            frame.boxes.append(box)
            inside |= dict.fromkeys(item.ops if isinstance(item, _Group) else [item], box)
        carried: dict[tuple[str, str], dict[fx.Node, int]] = {}
        for node, box in inside.items():
            for source, nbytes in self.sources(node).items():
                start = inside.get(source, box)
                if start is not box:
                    known = carried.setdefault((start.name, box.name), {})
                    known[source] = max(nbytes, known.get(source, 0))
        frame.arrows = [Arrow(*ends, sum(sizes.values())) for ends, sizes in carried.items()]
        return frame

    def _box(self, item: _Group | fx.Node, around: _Group, phase: str) -> Box:
        if isinstance(item, _Group):
            last = item.path.removeprefix(f"{around.path}.") if around.path else item.path
            last += f" ({kind})" if (kind := self._kinds.get(item.path)) else ""
            if item.is_open:
                box = self.framed(item, phase)
                box.lines = [last]
                return box
            counted = amount(sum(map(flops, item.ops)))
            about = [count_text(len(item.ops), "op"), *([f"{counted} FLOPs"] if counted else [])]
            note = f'draw(path, module="{item.path}") shows its ops'
            return Box("", [last, ", ".join(about)], phase, note)
        made = ", ".join(str(meta) for meta in metas(value(item)))
        reads = [self._text(source, item) for source in self.sources(item) if source not in around.members]
        note = "\n".join(filter(None, [f"{item.name} = {call_text(item)}", str(origin(item)), made]))
        op = short_target(item.target)
        heading = item.name if item.name.startswith(op.partition(".")[0]) else f"{item.name}: {op}"
        return Box("", [heading, made, *([f"reads {', '.join(reads)}"] if reads else [])], phase, note)

    def _text(self, source: fx.Node, reader: fx.Node) -> str:
        """What is read from outside: a parameter by its path in the module, anything else by its name."""
        if source in self.ports:
            path: str = self.ports[source].path
            module = origin(reader).module
            return path.removeprefix(f"{module}.") if module else path
        phase = origin(source).phase
        return f"{source.name} of {phase}" if phase and phase != origin(reader).phase else source.name


def _add_outside(frame: Box, group: _Group, known: _Known, phase: str) -> None:
    """Boxes for arguments, and for what other modules compute in the same phase."""
    ops, added = set(group.ops), dict[fx.Node, Box]()
    for box, item in list(zip(frame.boxes, group.items, strict=True)):
        carried: Counter[fx.Node] = Counter()
        for node in item.ops if isinstance(item, _Group) else [item]:
            for source, nbytes in known.sources(node).items():
                if source not in ops and _is_shown(source, known, phase):
                    carried[source] = max(nbytes, carried[source])
        for source, nbytes in carried.items():
            if source not in added:
                port = known.ports.get(source)
                title = (
                    port.path
                    if port is not None
                    else f"{source.name}, from {origin(source).module or 'build()'}"
                )
                made = value(source)
                added[source] = Box(
                    f"outside/{source.name}",
                    [title, str(made) if isinstance(made, TensorMeta) else bytes_text(nbytes)],
                    note=str(origin(source)),
                )
                frame.boxes.append(added[source])
            frame.arrows.append(Arrow(added[source].name, box.name, nbytes))


def _is_shown(source: fx.Node, known: _Known, phase: str) -> bool:
    port = known.ports.get(source)
    return origin(source).phase == phase if port is None else port.role is Role.USER and phase == "forward"


def all_arrows(found: Iterable[Panel]) -> list[Arrow]:
    """Those of all frames."""
    return [arrow for panel in found for box in panel.frame.every() for arrow in box.arrows]
