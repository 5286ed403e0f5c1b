"""Collectives of a graph that may be merged: what each sends, what it makes, and when that is there and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from monograph.distributed.programs.collectives import awaited_by, begins_collective
from monograph.ir.meta import UPDATE_PHASE, TensorMeta, computes, form, labels, origin
from monograph.layout import contiguous_stride

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
SUM, SCATTER, GATHER = (
    _c10d.all_reduce.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_gather_into_tensor.default,
)
# where an op has the number of processes of the group
_COUNT: Final = {SCATTER: 2, GATHER: 1}
VIEWS: Final = frozenset(
    (
        *(
            _aten.slice.Tensor,
            _aten.view.default,
            _aten.permute.default,
            _aten.t.default,
            _aten.alias.default,
        ),
        *(_aten.transpose.int, _aten.unsqueeze.default, _aten.detach.default),
    )
)
# what only moves numbers about
MOVES: Final = VIEWS | {
    *(_aten._to_copy.default, _aten.constant_pad_nd.default, _aten.clone.default, _aten.cat.default),
}
_ON_THE_WAY: Final = MOVES | {_aten.mul.Tensor}


TOGETHER: Final = (
    "gathered with what comes next"  # the label of a gather that may begin earlier than it stands
)


@dataclass(frozen=True)
class Begun:
    """A collective, the only op that waits for it, and what it sends: `scale` times `given`, or that itself."""

    begin: fx.Node
    wait: fx.Node
    given: fx.Node
    scale: float | None
    form: TensorMeta

    @property
    def op(self) -> Any:
        """What it does."""
        return self.begin.target

    @property
    def count(self) -> int:
        """How many parts it takes or makes, 1 for a sum."""
        place = _COUNT.get(self.op)
        found: Any = 1 if place is None else self.begin.args[place]
        return int(found)

    @property
    def kind(self) -> Any:
        """What collectives have in common that may be one."""
        return self.op, self.begin.args[1:], self.scale, self.form.dtype, self.form.device, labels(self.begin)

    @property
    def numel(self) -> int:
        """The number of elements that it sends."""
        return int(torch.Size(map(int, self.form.shape)).numel())

    @property
    def made(self) -> TensorMeta:
        """What it makes."""
        found = form(self.wait)
        assert found is not None
        return found


def begun_by(node: fx.Node) -> Begun | None:
    """The collective of a node; None for one that is none, and for one that cannot be merged."""
    if node.target not in (SUM, SCATTER, GATHER) or len(node.users) != 1:
        return None
    (wait,) = node.users
    given: Any = node.args[0]
    described = form(given)
    if awaited_by(wait) is not node or described is None or described.varies or form(wait) is None:
        return None
    if not described.shape and node.target is not SUM:
        return None
    if described.stride != contiguous_stride(described.shape):
        return None
    if given.target is _aten.mul.Tensor and type(given.args[1]) is float and len(given.users) == 1:
        source = given.args[0]
        if form(source) == described:
            return Begun(node, wait, source, given.args[1], described)
    return Begun(node, wait, given, None, described)


class Ready:
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
            moves = self.may_move(node)
            self._known[node] = max(map(self.of, inputs), default=-1) if moves else self.place[node]
        return self._known[node]

    @property
    def end(self) -> int:
        """The place after all ops."""
        return len(self.place)

    def first_read(self, item: Begun) -> int:
        """The place of the first op that reads what a collective makes, or unpacks it."""
        return min((self.place[reader] for reader in item.wait.users), default=self.end)

    def first_use(self, item: Begun) -> int:
        """The same, but of what is only sent on, where what comes back of that is read."""
        return min(map(self._used, item.wait.users), default=self.end)

    def _used(self, reader: fx.Node) -> int:
        further = begun_by(reader)
        if further is not None:
            return self.first_use(further)
        if self.may_move(reader):
            return min(map(self._used, reader.users), default=self.end)
        return self.place[reader]

    def sends_on(self, item: Begun) -> Iterator[Begun]:
        """The collectives whose results are all that a collective sends."""
        pending = [item.given]
        while pending:
            node = pending.pop()
            if (begin := awaited_by(node)) is not None and (before := begun_by(begin)) is not None:
                yield before
            elif node.target in _ON_THE_WAY:
                pending += node.all_input_nodes

    def may_move(self, node: fx.Node) -> bool:
        """True for what only prepares what a collective sends."""
        return node.target in _ON_THE_WAY and all(
            begins_collective(reader) or self.may_move(reader) for reader in node.users
        )

    def sent_by(self, *begun: fx.Node) -> list[fx.Node]:
        """The ops that prepare what collectives send, in order, without others."""
        found, pending = set[fx.Node](), list(begun)
        while pending:
            new = {node for node in pending.pop().all_input_nodes if self.may_move(node)} - found
            found |= new
            pending += new
        return sorted(found, key=self.place.__getitem__)


def wait_late(graph: fx.Graph) -> None:
    """Let each op that waits for a collective stand before the first that reads what is there then, with what unpacks it.

    What updates alone read is waited for before the first of them after it, in the order in which it was begun.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    waits = [(begin, node) for node in graph.nodes if (begin := awaited_by(node)) is not None]
    waits.sort(key=lambda item: place[item[0]])
    found = [(moved := unpacked(wait), _first_reader(moved, place)) for _, wait in waits]
    updates = {
        first for moved, first in found if origin(first).phase == UPDATE_PHASE != origin(moved[0]).phase
    }
    for moved, first in found:
        if awaited_by(first) is not None:
            continue  # it stands where it is read
        begun = place[moved[0].all_input_nodes[0]]
        later = (item for item in updates if place[item] > begun)  # a step may have several updates
        there = min(later, key=place.__getitem__) if first in updates else first
        for node in sorted(moved, key=place.__getitem__):
            there.prepend(node)


def _first_reader(moved: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> fx.Node:
    inside = set(moved)
    readers = [reader for node in moved for reader in node.users if reader not in inside]
    return min(readers, key=place.__getitem__, default=moved[0].graph.output_node())


def unpacks(node: fx.Node) -> bool:
    """True for an op that only shows what came in another form, copies it, or makes a mean of a sum."""
    if node.target in (_aten.div.Tensor, _aten.mul.Tensor):
        return isinstance(node.args[1], (int, float))
    return node.target in VIEWS or node.target in (_aten.view.dtype, _aten.clone.default, _aten.copy.default)


def unpacked(wait: fx.Node) -> list[fx.Node]:
    """What a collective gives, and what only shows it in another form."""
    found, pending = dict.fromkeys([wait]), [wait]
    while pending:
        new = list(filter(unpacks, pending.pop().users))
        found |= dict.fromkeys(new)
        pending += new
    return list(found)
