"""Sums of gradients over micro-batches, in the order in which one process adds them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

import torch
from torch import fx

from monograph.capture.accumulation.steps import rounds
from monograph.distributed.pipeline.transfers import Writer
from monograph.ir.meta import add_label, value
from monograph.ir.port import Port

_aten = torch.ops.aten


class Sum:
    """The gradients of a stage, added in the order of the micro-batches, whatever the order in which they are made."""

    def __init__(self, writer: Writer, stage: int, ports: Sequence[Port]) -> None:
        self.writer, self.stage = writer, stage
        self.rounds = list(rounds(ports))
        self.waiting: dict[int, tuple[fx.Node, int]] = {}
        self.next = 0
        self.total: dict[str, fx.Node] = {}
        self.list: fx.Node | None = None  # the sum of all, as long as each round is of all
        self.paths: Sequence[str] = ()

    def add(self, micro_batch: int, call: fx.Node, first: int) -> None:
        """Take the gradients of a micro-batch, which a call gives from its result `first` on."""
        self.waiting[micro_batch] = call, first
        while self.next in self.waiting:
            made, begin = self.waiting.pop(self.next)
            for position, paths in self.rounds:
                self._add(made, begin + position, paths, f"{made.name}_{position}")
            self.next += 1

    def _add(self, call: fx.Node, first: int, paths: Sequence[str], name: str) -> None:
        described = value(call)
        assert isinstance(described, tuple)
        place = slice(first, first + len(paths))
        made = self.writer.op(getitem, (call, place), described[place], f"{name}_gradients", "backward")
        if self.list is None and not self.total:
            self.list, self.paths = made, paths
        elif self.list is not None and paths == self.paths:
            args = (self.list, made)
            self.list = self.writer.op(
                _aten._foreach_add.List, args, value(self.list), f"{name}_sum", "backward"
            )
        else:
            total = self.totals()
            olds = [path for path in paths if path in total]
            for index, path in enumerate(paths):
                item = self._item(made, index, f"{name}_{index}_part")
                if path in olds:
                    item = self.writer.op(
                        _aten.add.Tensor, (total[path], item), value(item), f"{name}_{index}_sum", "backward"
                    )
                total[path] = item
            self.list, self.total = None, total

    def _item(self, source: fx.Node, index: int, name: str) -> fx.Node:
        described = value(source)
        assert isinstance(described, tuple)
        return self.writer.op(getitem, (source, index), described[index], name, "backward")

    def totals(self) -> dict[str, fx.Node]:
        """The sums by path."""
        if self.list is None:
            return dict(self.total)
        found = {}
        for index, path in enumerate(self.paths):
            found[path] = self._item(self.list, index, f"gradient_{self.stage}_{index}")
            add_label(found[path], path)
        return found
