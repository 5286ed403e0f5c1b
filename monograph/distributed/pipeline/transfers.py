"""Writes what goes from rank to rank into the graph of a step, in the layout that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from monograph.distributed.pipeline.parts import check_sent
from monograph.ir.meta import TensorMeta, add_label, value, write_op
from monograph.ir.ops.transfers import RECEIVE, SEND
from monograph.layout import contiguous_stride
from monograph.user_code.lines import Origin

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_TAG: Final = 0  # what two ranks send each other arrives in the order in which it was sent


@dataclass
class Writer:
    """The graph of a step as it is written."""

    num_ranks: int
    group: str
    graph: fx.Graph = field(default_factory=fx.Graph)

    def op(
        self, target: Any, args: tuple[Any, ...], described: Any, name: str, phase: str = "forward"
    ) -> fx.Node:
        """Write an op; `described` is what it gives."""
        return write_op(self.graph, target, args, described, Origin(phase=phase), name)

    # --- from one rank to another --------------------------------------------------------------------------------

    def send(self, item: fx.Node, to: int, phase: str) -> fx.Node:
        """Begin to send a value; gives what is to be waited for."""
        layout = _Layout.of(check_sent(item))
        form = _tensor(item)
        for dim in layout.repeated:
            form = replace(form, shape=_at(form.shape, dim, 1))
            item = self.op(_aten.slice.Tensor, (item, dim, 0, 1), form, f"{item.name}_once", phase)
        if layout.moves:
            form = replace(form, shape=_by(form.shape, layout.order), stride=_by(form.stride, layout.order))
            item = self.op(
                _aten.permute.default, (item, list(layout.order)), form, f"{item.name}_in_order", phase
            )
        if form.stride != contiguous_stride(form.shape):
            form = replace(form, stride=contiguous_stride(form.shape))
            node = self.op(_aten.clone.default, (item,), form, f"{item.name}_dense", phase)
            node.kwargs = {"memory_format": torch.contiguous_format}
            item = node
        empty = replace(form, shape=(0,), stride=(1,))
        return self.op(SEND, (item, to, _TAG, self.group), empty, f"{item.name}_sent", phase)

    def receive(self, like: fx.Node, source: int, name: str, phase: str) -> fx.Node:
        """Begin to receive a value of this form; `arrived` waits for it."""
        layout = _Layout.of(check_sent(like))
        form = _tensor(like)
        shape = tuple(1 if dim in layout.repeated else size for dim, size in enumerate(form.shape))
        shape = _by(shape, layout.order)
        received = replace(form, shape=shape, stride=contiguous_stride(shape))
        args = ([*shape], form.dtype, form.device, source, _TAG, self.group)
        return self.op(RECEIVE, args, received, name, phase)

    def wait(self, begun: fx.Node, phase: str) -> fx.Node:
        """Wait for what was begun."""
        return self.op(_c10d.wait_tensor.default, (begun,), value(begun), f"{begun.name}_done", phase)

    def arrived(self, begun: fx.Node, like: fx.Node, phase: str) -> fx.Node:
        """Wait for a value that comes, and show it in the layout that it has where it was made."""
        item = self.wait(begun, phase)
        wanted = _tensor(like)
        layout = _Layout.of(wanted)
        form = _tensor(item)
        if layout.moves:
            back = tuple(layout.order.index(dim) for dim in range(len(layout.order)))
            form = replace(form, shape=_by(form.shape, back), stride=_by(form.stride, back))
            item = self.op(_aten.permute.default, (item, list(back)), form, f"{item.name}_moved", phase)
        if layout.repeated:
            stride = tuple(0 if dim in layout.repeated else step for dim, step in enumerate(form.stride))
            form = replace(form, shape=wanted.shape, stride=stride)
            item = self.op(
                _aten.expand.default, (item, [*wanted.shape]), form, f"{item.name}_repeated", phase
            )
        if form.stride != wanted.stride and 0 not in wanted.shape:
            room = self.op(
                _aten.empty_strided.default,
                ([*wanted.shape], [*wanted.stride]),
                wanted,
                f"{item.name}_room",
                phase,
            )
            room.kwargs = {"dtype": wanted.dtype, "device": wanted.device}
            item = self.op(_aten.copy.default, (room, item), wanted, f"{item.name}_laid_out", phase)
        return item

    # --- to all ranks --------------------------------------------------------------------------------------------

    def from_one(self, item: fx.Node | None, like: TensorMeta, rank: int, name: str, phase: str) -> fx.Node:
        """A value that one rank has, on all; `item` is None on the others."""
        dense = replace(like, stride=contiguous_stride(like.shape))
        if item is None:
            item = self.op(_aten.empty.memory_format, ([*like.shape],), dense, f"{name}_room", phase)
            item.kwargs = {"dtype": like.dtype, "device": like.device}
        return self._of_all(_c10d.broadcast.default, (item, rank, self.group), dense, name, phase)

    def from_each(
        self, own: Sequence[fx.Node], counts: Sequence[int], like: TensorMeta, name: str, phase: str
    ) -> list[list[fx.Node]]:
        """Tensors of one element and type, so many of each rank, on all ranks: by rank."""
        most = max(counts)
        one = replace(like, shape=(1,), stride=(1,))
        flat = [self.op(_aten.view.default, (item, [1]), one, f"{item.name}_flat", phase) for item in own]
        if len(flat) < most:
            rest = replace(one, shape=(most - len(flat),))
            filler = self.op(_aten.full.default, ([*rest.shape], 0), rest, f"{name}_filler", phase)
            filler.kwargs = {"dtype": like.dtype, "device": like.device}
            flat.append(filler)
        packed = replace(one, shape=(most,))
        given = (
            flat[0]
            if len(flat) == 1
            else self.op(_aten.cat.default, (flat,), packed, f"{name}_packed", phase)
        )
        whole = replace(one, shape=(most * self.num_ranks,))
        args = (given, self.num_ranks, self.group)
        done = self._of_all(_c10d.all_gather_into_tensor.default, args, whole, name, phase)
        scalar = replace(like, shape=(), stride=())
        return [
            [
                self.op(
                    _aten.select.int, (done, 0, rank * most + index), scalar, f"{name}_{rank}_{index}", phase
                )
                for index in range(count)
            ]
            for rank, count in enumerate(counts)
        ]

    def _of_all(
        self, target: Any, args: tuple[Any, ...], described: TensorMeta, name: str, phase: str
    ) -> fx.Node:
        """What a collective of all ranks gives. All label it by the same name, though each gives it a value of its own."""
        begun = self.op(target, args, described, f"{name}_begun", phase)
        add_label(begun, name)
        return self.wait(begun, phase)


@dataclass(frozen=True)
class _Layout:
    """The dimensions of a tensor as they are in memory, and those along which it repeats itself there."""

    order: tuple[int, ...]
    repeated: tuple[int, ...]

    @classmethod
    def of(cls, form: TensorMeta) -> _Layout:
        dims = range(len(form.shape))
        repeated = tuple(dim for dim in dims if form.stride[dim] == 0 and form.shape[dim] > 1)
        if form.stride == contiguous_stride(form.shape) or 0 in form.shape:
            return cls(tuple(dims), ())
        order = sorted(dims, key=lambda dim: (-form.stride[dim], dim))
        return cls(tuple(order), repeated)

    @property
    def moves(self) -> bool:
        return self.order != tuple(range(len(self.order)))


def _tensor(item: fx.Node) -> TensorMeta:
    found = value(item)
    assert isinstance(found, TensorMeta)
    return replace(found, requires_grad=False)


def _by(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes[dim] for dim in order)


def _at(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])
