"""What the step of one rank of a pipeline gives: new state of its own, and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from monograph.capture.accumulation.steps import joined
from monograph.distributed.pipeline.spread import Spread
from monograph.distributed.pipeline.transfers import Writer
from monograph.ir.meta import TensorMeta, output_nodes, value
from monograph.ir.port import Port, Role

_aten = torch.ops.aten
Key: TypeAlias = tuple[Role, str]  # an output by its role and path


@dataclass(frozen=True)
class Results:
    """Writes the outputs of a rank, from what its micro-batches and its update have made."""

    writer: Writer
    spread: Spread
    rank: int
    early: Mapping[Key, Mapping[int, fx.Node]]
    late: Mapping[Key, fx.Node]

    def outputs(self) -> Iterator[tuple[Any, Port]]:
        """All of them; new state of other ranks is none."""
        program = self.spread.program
        for item, port in zip(output_nodes(program.graph), program.outputs, strict=True):
            if not isinstance(item, fx.Node):
                yield item, port
            elif port.role is not Role.STATE:
                yield self._result(item, port), port
            elif self.spread.maker(port) in (None, self.rank) and (made := self._own(port)) is not None:
                yield made, port

    def _own(self, port: Port) -> fx.Node | None:
        """What this rank has made of an output of the step."""
        key = port.role, port.path
        if key in self.late:
            return self.late[key]
        if (found := self.early.get(key)) is None:
            return None
        items = [found[index] for index in sorted(found)]
        is_batch = port.role in (Role.USER, Role.PROBE) or port.path in self.spread.split
        described = value(items[0])
        if not is_batch or not isinstance(described, TensorMeta):
            return items[-1]
        name = port.path.replace(".", "_")
        if not described.shape:
            meta = replace(described, shape=(len(items),), stride=(1,))
            return self.writer.op(_aten.stack.default, (items,), meta, f"stacked_{name}")
        meta = joined(described, len(items))
        return self.writer.op(_aten.cat.default, (items,), meta, f"joined_{name}")

    def _result(self, item: fx.Node, port: Port) -> fx.Node:
        """A result: one that is a scalar for each micro-batch on all ranks, another one on the last, and elsewhere empty."""
        described = value(item)
        maker, own = self.spread.maker(port), self._own(port)
        if maker is None or not isinstance(described, TensorMeta) or self.spread.is_sent_to_all(port):
            assert own is not None
            return own
        described = replace(described, requires_grad=False)
        name = port.path.replace(".", "_")
        if self.spread.is_scalar(port):
            return self.writer.from_one(
                own if maker == self.rank else None, described, maker, f"{name}_of_all", "forward"
            )
        last = self.spread.last_rank
        if maker == last == self.rank:
            assert own is not None
            return own
        if maker == self.rank:
            assert own is not None
            self.writer.wait(self.writer.send(own, last, "forward"), "forward")
        elif last == self.rank:
            return self.writer.arrived(
                self.writer.receive(item, maker, f"{name}_from_{maker}", "forward"), item, "forward"
            )
        empty = replace(described, shape=(0, *described.shape[1:]))
        node = self.writer.op(
            _aten.empty_strided.default, ([*empty.shape], [*empty.stride]), empty, f"{name}_elsewhere"
        )
        node.kwargs = {"dtype": empty.dtype, "device": empty.device}
        return node
