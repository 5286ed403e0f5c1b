"""The step of one rank of a pipeline: its parts, called in the order of a schedule, with what it sends and receives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from monograph.capture.accumulation.first_buffers import take_over
from monograph.compat.distributed.pipelining import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Action,
)
from monograph.compat.ops import named_input
from monograph.compat.traces.nodes import graph_module
from monograph.distributed.pipeline.parts import Part
from monograph.distributed.pipeline.results import Key, Results
from monograph.distributed.pipeline.spread import STATE, Spread
from monograph.distributed.pipeline.stages import Pipeline
from monograph.distributed.pipeline.sums import Sum
from monograph.distributed.pipeline.transfers import Writer
from monograph.ir.meta import TensorMeta, output_nodes, set_value, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program

_aten = torch.ops.aten


def rank_program(program: Program, pipeline: Pipeline, rank: int, *, split: Collection[str]) -> Program:
    """The program of a rank: its inputs are the arguments, numbers, and the state that it reads. For one rank; see `of_rank`.

    `program` calls `accumulate` for each micro-batch and then `update`, as `two_programs` makes it; `split` are the paths of the
    arguments that are batches. Raises DistributedError for a step that cannot be cut so.
    """
    return of_rank(Spread(program, pipeline, split), rank)


def of_rank(spread: Spread, rank: int) -> Program:
    """The program of one of the ranks that a step is spread over."""
    return _Step(spread, rank).program()


class _Step:
    """Writes the program of a rank. Values of a micro-batch are known by stage and micro-batch."""

    def __init__(self, cut: Spread, rank: int) -> None:
        self.cut, self.rank, self.pipeline = cut, rank, cut.pipeline
        self.micro = cut.micro
        self.writer = Writer(self.pipeline.num_ranks, self.pipeline.group)
        self.parts: dict[str, Program] = {}
        self.current: dict[str, fx.Node] = {}  # the present value of each input, by path
        self.known: dict[tuple[int, int], dict[fx.Node, fx.Node]] = {}
        self.then: dict[
            tuple[int, int], dict[str, fx.Node]
        ] = {}  # state as the forward of a micro-batch had it
        self.coming: dict[tuple[str, int, int], list[fx.Node]] = {}  # what was begun to be received
        self.going: dict[tuple[str, int, int], list[fx.Node]] = {}
        self.results: dict[Key, dict[int, fx.Node]] = {}  # of each micro-batch
        self.borrowed: dict[
            str, tuple[fx.Node, fx.Node]
        ] = {}  # state of other ranks that comes, by path, with its form
        self.lent: list[fx.Node] = []
        self.gradients: dict[int, Sum] = {}
        self.made: dict[Key, fx.Node] = {}  # by the update

    def program(self) -> Program:
        """Write it."""
        whole = self.cut.program
        mine = self.pipeline.orders.stages_of(self.rank)
        changed = self.micro.changed.keys()
        inputs = list(self._inputs(zip(_placeholders(whole.graph), whole.inputs, strict=True)))
        for taken in self.cut.taken_over:
            own = tuple(path for path in taken.paths if path in changed and path in self.current)
            self.current |= take_over(self.writer.graph, replace(taken, paths=own), self.current)
        for stage in mine:
            self.gradients[stage] = Sum(
                self.writer, stage, [port for _, port in self.micro.gradients(stage) if port]
            )
        for action in self.pipeline.orders.actions[self.rank]:
            _DO[action.kind](self, action)
        for key in list(self.going):
            self._wait_sent(*key)
        for begun in self.lent:
            self.writer.wait(begun, "forward")
        self._update()
        outputs = list(Results(self.writer, self.cut, self.rank, self.results, self.made).outputs())
        self.writer.graph.output(tuple(item for item, _ in outputs))
        root = nn.Module()
        for part in self.parts.values():
            root.add_module(part.name, part.module)
        module = graph_module(root, self.writer.graph)
        ports = tuple(port for _, port in outputs)
        return Program(whole.name, module, tuple(inputs), ports, tuple(self.parts.values()))

    def _inputs(self, found: Iterable[tuple[fx.Node, Port]]) -> Iterator[Port]:
        """Write the inputs. State that another rank reads too is lent to it, for this step."""
        cut = self.cut
        read = cut.reads[self.rank] | cut.update.read_by(self.rank, self._wanted)
        lent: list[tuple[fx.Node, int]] = []
        borrowed: list[tuple[fx.Node, str, int]] = []
        for node, port in found:
            owner = cut.rank_of(port)
            readers = [
                rank
                for rank in range(self.pipeline.num_ranks)
                if rank != owner and port.path in cut.reads[rank]
            ]
            if owner not in (None, self.rank):
                borrowed += [(node, port.path, owner)] if self.rank in readers else []
            elif port.role not in STATE or port.path in read or (owner is not None and readers):
                placeholder = named_input(self.writer.graph, node.name)
                set_value(placeholder, value(node))
                self.current[port.path] = placeholder
                lent += [(placeholder, rank) for rank in readers if owner is not None]
                yield Port(placeholder.name, port.role, port.path)
        self.lent = [self.writer.send(node, rank, "forward") for node, rank in lent]
        for node, path, owner in borrowed:
            self.borrowed[path] = self.writer.receive(node, owner, f"{node.name}_lent", "forward"), node

    def _input(self, path: str) -> fx.Node:
        """The present value of an input of the whole step."""
        if path in self.borrowed:
            begun, like = self.borrowed.pop(path)
            self.current[path] = self.writer.arrived(begun, like, "forward")
        return self.current[path]

    # --- micro-batches -------------------------------------------------------------------------------------------

    def _receive(self, action: Action) -> None:
        forward = action.kind == RECEIVE_FORWARD
        other = action.stage + (-1 if forward else 1)
        values = self.micro.sent_forward(other) if forward else self.micro.sent_backward(other)
        phase = "forward" if forward else "backward"
        source = self.cut.ranks[other]
        self.coming[phase, action.stage, action.micro_batch] = [
            self.writer.receive(item, source, f"{item.name}_{action.micro_batch}_to_{action.stage}", phase)
            for item in values
        ]

    def _send(self, action: Action) -> None:
        forward = action.kind == SEND_FORWARD
        other = action.stage + (1 if forward else -1)
        values = self.micro.sent_forward(action.stage) if forward else self.micro.sent_backward(action.stage)
        phase = "forward" if forward else "backward"
        if not forward:
            for key in [key for key in self.going if key[:2] == (phase, action.stage)]:
                self._wait_sent(*key)
        known, to = self._known(action.stage, action.micro_batch), self.cut.ranks[other]
        self.going[phase, action.stage, action.micro_batch] = [
            self.writer.send(known[item], to, phase) for item in values
        ]

    def _wait_sent(self, phase: str, stage: int, micro_batch: int) -> None:
        for begun in self.going.pop((phase, stage, micro_batch), []):
            self.writer.wait(begun, phase)

    def _known(self, stage: int, micro_batch: int) -> dict[fx.Node, fx.Node]:
        return self.known.setdefault((stage, micro_batch), {})

    def _arrive(self, phase: str, action: Action) -> None:
        """Have what the neighbouring stage gives: it comes, or is on this rank."""
        forward = phase == "forward"
        other = action.stage + (-1 if forward else 1)
        if not 0 <= other < self.pipeline.num_stages:
            return
        values = self.micro.sent_forward(other) if forward else self.micro.sent_backward(other)
        known = self._known(action.stage, action.micro_batch)
        if self.cut.ranks[other] == self.rank:
            beside = self._known(other, action.micro_batch)
            known |= {item: beside[item] for item in values}
            return
        begun = self.coming.pop((phase, action.stage, action.micro_batch))
        for item, node in zip(values, begun, strict=True):
            known[item] = self.writer.arrived(node, item, phase)

    def _forward(self, action: Action) -> None:
        self._arrive("forward", action)
        self.then[action.stage, action.micro_batch] = {
            path: self.current[path] for path in self.micro.changed if path in self.current
        }
        self._call_part(action)

    def _backward(self, action: Action) -> None:
        self._wait_sent("forward", action.stage, action.micro_batch)
        self._arrive("backward", action)
        self._call_part(action)
        if action.kind == BACKWARD:
            self._done(action)

    def _backward_weight(self, action: Action) -> None:
        self._call_part(action)
        self._done(action)

    def _done(self, action: Action) -> None:
        """Nothing reads the values of a micro-batch in a stage any more, but what is on its way through this rank."""
        stage, micro_batch = action.stage, action.micro_batch
        kept = set(self.micro.sent_backward(stage))
        self.known[stage, micro_batch] = {
            k: v for k, v in self._known(stage, micro_batch).items() if k in kept
        }

    def _call_part(self, action: Action) -> None:
        part = self.micro.part(action.kind, action.stage)
        if part is None:
            return
        known = self._known(action.stage, action.micro_batch)
        then = self.then[action.stage, action.micro_batch]
        given = []
        for node in part.given:
            port = self.micro.ports.get(node)
            if port is None:
                given.append(known[node])
            elif port.path in self.cut.split:
                given.append(self._rows(port, action.micro_batch))
            else:
                given.append(then.get(port.path) or self._input(port.path))
        name = f"{part.program.name}_of_{action.micro_batch}"
        call = self._call(part, given, name)
        first = sum(port is None or port.role is not Role.GRAD for _, port in part.made)
        for position, (item, port) in enumerate(part.made[:first]):
            made = self._item(call, position, f"{name}_{position}")
            known.setdefault(item, made)
            if port is not None:
                self._keep_result(port, action, made)
        if first < len(part.made) or (action.kind in (BACKWARD, BACKWARD_WEIGHT)):
            sums = self.gradients[action.stage]
            sums.add(action.micro_batch, call, first)

    def _keep_result(self, port: Port, action: Action, made: fx.Node) -> None:
        found = self.results.setdefault((port.role, port.path), {})
        if port.role is Role.STATE and port.path in self.current and port.path not in self.cut.split:
            self.current[port.path] = made
        found[action.micro_batch] = made

    def _rows(self, port: Port, micro_batch: int) -> fx.Node:
        whole = self.current[port.path]
        described = value(whole)
        if not isinstance(described, TensorMeta):
            return whole
        size = described.shape[0] // self.pipeline.micro_batches
        meta = replace(described, shape=(size, *described.shape[1:]))
        args = (whole, 0, micro_batch * size, (micro_batch + 1) * size)
        return self.writer.op(_aten.slice.Tensor, args, meta, f"{whole.name}_{micro_batch}")

    def _call(self, part: Part, given: Sequence[fx.Node], name: str) -> fx.Node:
        self.parts.setdefault(part.program.name, part.program)
        call = self.writer.graph.create_node("call_module", part.program.name, tuple(given), {}, name=name)
        set_value(call, tuple(value(item) for item in output_nodes(part.program.graph)))
        return call

    def _item(self, source: fx.Node, position: int | slice, name: str) -> fx.Node:
        described = value(source)
        assert isinstance(described, tuple)
        return self.writer.op(getitem, (source, position), described[position], name)

    # --- the update and what the step gives ----------------------------------------------------------------------

    def _wanted(self, port: Port) -> bool:
        return self.cut.is_for(port, self.rank)

    def _update(self) -> None:
        given = dict(self.current)
        for sums in self.gradients.values():
            given |= sums.totals()

        def call(part: Part, values: Sequence[fx.Node], name: str) -> list[fx.Node]:
            made = self._call(part, values, name)
            return [self._item(made, index, f"{name}_{index}") for index in range(len(part.made))]

        self.made, _ = self.cut.update.write(self.writer, self.rank, self._wanted, given, call)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


_DO: Mapping[str, Any] = {
    FORWARD: _Step._forward,
    BACKWARD: _Step._backward,
    BACKWARD_INPUT: _Step._backward,
    BACKWARD_WEIGHT: _Step._backward_weight,
    SEND_FORWARD: _Step._send,
    SEND_BACKWARD: _Step._send,
    RECEIVE_FORWARD: _Step._receive,
    RECEIVE_BACKWARD: _Step._receive,
}
