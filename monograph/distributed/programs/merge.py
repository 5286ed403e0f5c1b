"""Several collectives as one: what they send is packed, and what comes is unpacked. Each number is what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.distributed.programs.begun import GATHER, SUM, Begun
from monograph.ir.meta import TensorMeta, add_label, form, labels, origin, set_value, value, write_op
from monograph.layout import contiguous_stride
from monograph.user_code.lines import Origin

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


def merge(graph: fx.Graph, bucket: Sequence[Begun]) -> fx.Node:
    """Write one collective for some of one kind, where the first of them begins; gives it.

    Sums may follow on scattered sums of the same processes: each process gives what it adds to all parts.
    """
    first, writer = bucket[0], _Writer(graph, bucket[0])
    with graph.inserting_before(first.begin):
        flat = writer.packed(bucket)
        if first.scale is not None:
            flat = writer.op(_aten.mul.Tensor, flat, first.scale, shape=writer.shape(flat))
        count = first.count if first.op is GATHER else 1
        share = 1 if first.op in (SUM, GATHER) else first.count
        (numel,) = writer.shape(flat)
        shape = [numel * count // share]
        begun = writer.op(first.op, flat, *first.begin.args[1:], shape=shape)
        for label in labels(first.begin):
            add_label(begun, label)
        done = writer.op(_c10d.wait_tensor.default, begun, shape=shape)
        if first.op is GATHER:
            done = writer.view(done, [count, numel])
        at = 0
        for item in bucket:
            size = item.numel if item.op is SUM else item.numel // share
            piece = writer.piece(done, at, at + size)
            whole = writer.view(piece, [*item.made.shape])
            set_value(whole, value(item.wait))
            item.wait.replace_all_uses_with(whole)
            at += size
    for item in bucket:
        given = item.begin.args[0]
        graph.erase_node(item.wait)
        graph.erase_node(item.begin)
        if item.scale is not None and isinstance(given, fx.Node) and not given.users:
            graph.erase_node(given)
    return begun


class _Writer:
    """Writes the ops of a bucket."""

    def __init__(self, graph: fx.Graph, like: Begun) -> None:
        self._graph, self._like = graph, like.form
        self._origin = Origin(phase=origin(like.begin).phase)

    def op(self, target: Any, *args: Any, shape: Sequence[int]) -> fx.Node:
        """An op that gives a contiguous tensor of this shape."""
        stride = contiguous_stride(shape)
        made = replace(self._like, shape=tuple(shape), stride=stride, requires_grad=False)
        return write_op(self._graph, target, args, made, self._origin)

    def shape(self, node: fx.Node) -> list[int]:
        """The shape of a value."""
        found = form(node)
        assert isinstance(found, TensorMeta)
        return [*map(int, found.shape)]

    def view(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """The same elements in another shape; itself if it has that."""
        if self.shape(node) == list(shape):
            return node
        return self.op(_aten.view.default, node, list(shape), shape=shape)

    def packed(self, bucket: Sequence[Begun]) -> fx.Node:
        """What all of a bucket send, in a row: of what is scattered the first part of each, then the second ..."""
        first, numel = bucket[0], sum(item.numel for item in bucket)
        if first.op in (SUM, GATHER):
            rows = [self.view(item.given, [item.numel]) for item in bucket]
            return self.op(_aten.cat.default, rows, shape=[numel])
        count = first.count
        parts = [self.part(item, count) for item in bucket]
        width = sum(self.shape(part)[1] for part in parts)
        return self.view(self.op(_aten.cat.default, parts, 1, shape=[count, width]), [count * width])

    def part(self, item: Begun, count: int) -> fx.Node:
        """What is scattered, a part in each row; in each row all of a sum."""
        if item.op is not SUM:
            return self.view(item.given, [count, item.numel // count])
        row = self.view(item.given, [1, item.numel])
        made = self.op(_aten.expand.default, row, [count, item.numel], shape=[count, item.numel])
        described = form(made)
        assert described is not None
        set_value(made, replace(described, stride=(0, 1)))
        return made

    def piece(self, done: fx.Node, begin: int, end: int) -> fx.Node:
        """What one of a bucket gets: of what was gathered a copy, since its parts are apart."""
        rows = self.shape(done)
        if len(rows) == 1:
            return self.op(_aten.slice.Tensor, done, 0, begin, end, shape=[end - begin])
        part = self.op(_aten.slice.Tensor, done, 1, begin, end, shape=[rows[0], end - begin])
        described = form(part)
        assert described is not None
        set_value(part, replace(described, stride=(rows[1], 1)))
        whole = self.op(_aten.clone.default, part, shape=[rows[0], end - begin])
        whole.kwargs = {"memory_format": torch.contiguous_format}
        return whole
