"""Sums over processes in few collectives, each of which begins when its last part is there and ends when the first is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from monograph.distributed.programs.collectives import awaited_by, begins_collective
from monograph.ir.meta import TensorMeta, computes, form, set_origin, set_value, value
from monograph.ir.meta import origin as origin_of
from monograph.ir.program import Program
from monograph.layout import contiguous_stride
from monograph.user_code.lines import Origin

FIRST_BYTES: Final = 1 << 20  # of the first bucket, so that something is on its way early
BUCKET_BYTES: Final = 25 << 20  # of others, as DistributedDataParallel has them
_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_ON_THE_WAY: Final = frozenset(
    (_aten.permute.default, _aten.view.default, _aten.t.default, _aten.transpose.int, _aten.mul.Tensor)
)


def merge_sums(program: Program) -> Program:
    """Merge sums over one group that do not need each other, in the order in which what they add is there."""
    copy = program.rebuilt()
    graph = copy.graph
    begun = [item for item in map(_sum_in, graph.nodes) if item is not None]
    if not begun:
        return program
    ready = _Ready(graph)
    begun.sort(key=lambda item: (ready.of(item.given), ready.place[item.begin]))
    for bucket in _buckets(begun, ready):
        present = [found for item in bucket if (found := _sum_in(item.begin)) is not None]
        _begin_early(present, _Ready(graph))
        if len(present) > 1:
            _merge(graph, present)
    _wait_late(graph)
    return copy.with_graph(graph)


@dataclass(frozen=True)
class _Sum:
    """An all-reduce, the only op that waits for it, and what it adds: `scale` times `given`, or that itself."""

    begin: fx.Node
    wait: fx.Node
    given: fx.Node
    scale: float | None
    form: TensorMeta

    @property
    def kind(self) -> Any:
        """What sums have in common that may be one."""
        return self.begin.args[1:], self.scale, self.form.dtype, self.form.device

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(map(int, self.form.shape)).numel())


def _sum_in(node: fx.Node) -> _Sum | None:
    if node.target is not _c10d.all_reduce.default or len(node.users) != 1:
        return None
    (wait,) = node.users
    given: Any = node.args[0]
    described = form(given)
    if awaited_by(wait) is not node or described is None or described.varies:
        return None
    if described.stride != contiguous_stride(described.shape):
        return None
    if given.target is _aten.mul.Tensor and type(given.args[1]) is float and len(given.users) == 1:
        source = given.args[0]
        if form(source) == described:
            return _Sum(node, wait, source, given.args[1], described)
    return _Sum(node, wait, given, None, described)


class _Ready:
    """After which op of a graph a value can be there: what only leads to a collective may run earlier than it stands."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self._known: dict[fx.Node, int] = {}

    def of(self, node: fx.Node) -> int:
        """The place of the last op that has to run before, -1 for inputs."""
        if not computes(node):
            return -1
        if node not in self._known:
            inputs = node.all_input_nodes
            self._known[node] = (
                max(map(self.of, inputs), default=-1) if self.may_move(node) else self.place[node]
            )
        return self._known[node]

    @property
    def end(self) -> int:
        """The place behind all ops."""
        return len(self.place)

    def first_read(self, item: _Sum) -> int:
        """The place of the first op that reads a sum, or shows it."""
        return min((self.place[reader] for reader in item.wait.users), default=self.end)

    def may_move(self, node: fx.Node) -> bool:
        """True for what only prepares what a collective sends."""
        return node.target in _ON_THE_WAY and all(
            begins_collective(reader) or self.may_move(reader) for reader in node.users
        )


def _buckets(begun: Sequence[_Sum], ready: _Ready) -> Iterator[list[_Sum]]:
    """Sums that may be one, in order: none is read before what the last of them adds is there."""
    bucket: list[_Sum] = []
    held, limit = 0, FIRST_BYTES
    for item in begun:
        nbytes = item.numel * item.form.dtype.itemsize
        fits = not bucket or (item.kind == bucket[0].kind and held + nbytes <= limit)
        if not fits or ready.of(item.given) >= min(map(ready.first_read, bucket), default=ready.end):
            yield bucket
            bucket, held, limit = [], 0, BUCKET_BYTES
        bucket.append(item)
        held += nbytes
    if bucket:
        yield bucket


def _begin_early(bucket: Sequence[_Sum], ready: _Ready) -> None:
    """Let what a bucket adds, and its collectives, stand right after the last op that they need."""
    begun = [item.begin for item in bucket]
    found, pending = set[fx.Node](), list(begun)
    while pending:
        new = {node for node in pending.pop().all_input_nodes if ready.may_move(node)} - found
        found |= new
        pending += new
    moved = sorted(found, key=ready.place.__getitem__)
    needed = {source for node in (*moved, *begun) for source in node.all_input_nodes} - set(moved)
    last = max(needed, key=ready.place.__getitem__)
    for node in (*moved, *begun):
        last.append(node)
        last = node


def _merge(graph: fx.Graph, bucket: Sequence[_Sum]) -> None:
    first = bucket[0]
    writer = _Writer(graph, bucket)
    with graph.inserting_before(first.begin):
        rows = [writer.view(item.given, [item.numel]) for item in bucket]
        flat = writer.op(_aten.cat.default, rows, like=first, numel=sum(item.numel for item in bucket))
        if first.scale is not None:
            flat = writer.op(_aten.mul.Tensor, flat, first.scale, like=first)
        begin = writer.op(_c10d.all_reduce.default, flat, *first.begin.args[1:], like=first)
        done = writer.op(_c10d.wait_tensor.default, begin, like=first)
        at = 0
        for item in bucket:
            piece = writer.op(_aten.slice.Tensor, done, 0, at, at + item.numel, like=first, numel=item.numel)
            whole = writer.view(piece, [*item.form.shape])
            set_value(whole, value(item.wait))
            item.wait.replace_all_uses_with(whole)
            at += item.numel
    for item in bucket:
        given = item.begin.args[0]
        graph.erase_node(item.wait)
        graph.erase_node(item.begin)
        if item.scale is not None and isinstance(given, fx.Node) and not given.users:
            graph.erase_node(given)


class _Writer:
    """Writes the ops of a bucket, which belong to the module that all its sums are in."""

    def __init__(self, graph: fx.Graph, bucket: Sequence[_Sum]) -> None:
        self._graph = graph
        self._origin = Origin(phase=origin_of(bucket[0].begin).phase)
        self._row: TensorMeta | None = None

    def view(self, node: fx.Node, shape: list[Any]) -> fx.Node:
        """The same elements in another shape; itself if it has that."""
        described = form(node)
        assert described is not None
        if list(described.shape) == shape:
            return node
        made = self._graph.call_function(_aten.view.default, (node, shape))
        set_value(made, replace(described, shape=tuple(shape), stride=contiguous_stride(shape)))
        set_origin(made, self._origin)
        return made

    def op(self, target: Any, *args: Any, like: _Sum, numel: int | None = None) -> fx.Node:
        """An op that gives a row, of as many elements as the last one."""
        node = self._graph.call_function(target, args)
        if numel is not None:
            self._row = replace(like.form, shape=(numel,), stride=(1,))
        set_value(node, self._row)
        set_origin(node, self._origin)
        return node


def _wait_late(graph: fx.Graph) -> None:
    """Let each op that waits for a collective stand before the first that reads what is there then, with views of it."""
    for wait in [node for node in graph.nodes if awaited_by(node) is not None]:
        place = {node: index for index, node in enumerate(graph.nodes)}
        moved = {wait}
        pending = [wait]
        while pending:
            for reader in pending.pop().users:
                if reader.target in (_aten.slice.Tensor, _aten.view.default, _aten.permute.default):
                    moved.add(reader)
                    pending.append(reader)
        readers = [reader for node in moved for reader in node.users if reader not in moved]
        first = min(readers, key=place.__getitem__, default=graph.output_node())
        for node in sorted(moved, key=place.__getitem__):
            first.prepend(node)
