"""The step of one rank of a pipeline: its parts, called in the order of a schedule, with what it sends and receives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from monograph.capture.accumulation.steps import joined, rounds
from monograph.capture.pipeline.cut import MicroBatch
from monograph.capture.pipeline.homes import is_scalar
from monograph.capture.pipeline.parts import Part
from monograph.capture.pipeline.stages import Pipeline
from monograph.capture.pipeline.transfers import Writer
from monograph.capture.pipeline.update import Update
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
from monograph.errors import DistributedError
from monograph.ir.meta import TensorMeta, add_label, output_nodes, set_value, value
from monograph.ir.port import GRADIENTS, Port, Role
from monograph.ir.program import Program

_aten = torch.ops.aten
_STATE = (Role.PARAM, Role.BUFFER, Role.OPTIM, Role.EMA, Role.SCALER)


class Cut:
    """A step over micro-batches, cut for all ranks."""

    def __init__(self, program: Program, pipeline: Pipeline, split: Collection[str]) -> None:
        """`program` calls `accumulate` for each micro-batch and then `update`; `split` are the paths of its batches."""
        accumulate, update = program.parts
        self.program, self.pipeline, self.split = program, pipeline, split
        self.micro = MicroBatch(accumulate, pipeline)
        self.ranks = pipeline.orders.ranks
        self._gradients = {
            port.path: self.ranks[self.micro.stage_of(item, port).stage]
            for item, port in self.micro.placing.outputs
            if port.role is Role.GRAD and isinstance(item, fx.Node)
        }
        self.update = Update(update, self.rank_of, pipeline.num_ranks)
        self._inputs = {port.path: port for port in program.inputs}
        self._early = {
            (port.role, port.path): (item, port)
            for item, port in self.micro.placing.outputs
            if isinstance(item, fx.Node)
        }

    def rank_of(self, port: Port) -> int | None:
        """The rank that a gradient is summed on, or that updates state; None for what all ranks have."""
        if port.role is Role.GRAD:
            return self._gradients.get(port.path)
        if port.role in (Role.PARAM, Role.BUFFER):
            return self._owner(port.path)
        if port.role is Role.OPTIM:
            return self._owner(port.path.partition("/")[2].rpartition("/")[0])
        if port.role is Role.EMA:
            return self._owner(port.path.partition("/")[2].replace("/", ".", 1))
        return None

    def _owner(self, path: str) -> int | None:
        """The rank that a parameter or buffer belongs to: where its gradient is, where it changes, or where it is read first."""
        if (found := self._gradients.get(f"{GRADIENTS}{path}")) is not None:
            return found
        stage = self.micro.changed.get(path)
        if stage is None:
            stage = self._first_reader.get(path)
        if stage is None:
            stage = self.pipeline.stage_of(path.rpartition(".")[0])
        return None if stage is None else self.ranks[stage]

    @cached_property
    def _first_reader(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for stage in range(self.pipeline.num_stages):
            for path in self.micro.read_by(stage):
                found.setdefault(path, stage)
        return found

    def for_rank(self, rank: int) -> Program:
        """The program of a rank. Its inputs are the arguments, numbers, and the state that it reads."""
        return _Step(self, rank).program()

    # --- which rank has what -----------------------------------------------------------------------------------------

    @cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """By rank the paths of the inputs that its micro-batches read."""
        return tuple(map(self._read_by, range(self.pipeline.num_ranks)))

    def _read_by(self, rank: int) -> frozenset[str]:
        return frozenset(path for stage in self.pipeline.orders.stages_of(rank) for path in self.micro.read_by(stage))

    def maker(self, port: Port) -> int | None:
        """The rank that makes an output of the step; None if all do."""
        if (port.role, port.path) in self.update.late:
            return self.update.home(port)
        made = self._early.get((port.role, port.path))
        return None if made is None else self.ranks[self.micro.stage_of(*made).stage]

    def is_scalar(self, port: Port) -> bool:
        """True for an output of each micro-batch that is a tensor without dimensions."""
        made = self._early.get((port.role, port.path))
        return made is not None and is_scalar(made[0])

    def is_for(self, port: Port, rank: int) -> bool:
        """True for an output of the update that a rank makes: its own state, and what all ranks have."""
        home = self.update.home(port)
        if port.role is not Role.STATE:
            return home in (None, rank) or self.is_sent_to_all(port)
        if home is not None:
            return home == rank
        known = self._inputs.get(port.path)
        return known is None or self.rank_of(known) in (None, rank)

    def is_sent_to_all(self, port: Port) -> bool:
        """True for an output of the update that all ranks get."""
        return self.update.late.get((port.role, port.path)) in self.update.homes.sent

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return self.ranks[-1]


class _Step:
    """Writes the program of a rank. Values of a micro-batch are known by stage and micro-batch."""

    def __init__(self, cut: Cut, rank: int) -> None:
        self.cut, self.rank, self.pipeline = cut, rank, cut.pipeline
        self.micro = cut.micro
        self.writer = Writer(self.pipeline.num_ranks, self.pipeline.group)
        self.parts: dict[str, Program] = {}
        self.current: dict[str, fx.Node] = {}  # the present value of each input, by path
        self.known: dict[tuple[int, int], dict[fx.Node, fx.Node]] = {}
        self.then: dict[tuple[int, int], dict[str, fx.Node]] = {}  # state as the forward of a micro-batch had it
        self.coming: dict[tuple[str, int, int], list[fx.Node]] = {}  # what was begun to be received
        self.going: dict[tuple[str, int, int], list[fx.Node]] = {}
        self.results: dict[tuple[Role, str], dict[int, fx.Node]] = {}
        self.gradients: dict[int, _Sum] = {}
        self.made: dict[tuple[Role, str], fx.Node] = {}  # by the update

    def program(self) -> Program:
        """Write it."""
        whole = self.cut.program
        mine = self.pipeline.orders.stages_of(self.rank)
        read = self.cut.reads[self.rank] | self.cut.update.read_by(self.rank, self._wanted)
        inputs = []
        for node, port in zip(_placeholders(whole.graph), whole.inputs, strict=True):
            if port.role in _STATE and port.path not in read:
                continue
            placeholder = self.writer.graph.placeholder(node.name)
            set_value(placeholder, value(node))
            self.current[port.path] = placeholder
            inputs.append(Port(placeholder.name, port.role, port.path))
        for stage in mine:
            self.gradients[stage] = _Sum(self.writer, stage, [port for _, port in self.micro.gradients(stage) if port])
        for action in self.pipeline.orders.actions[self.rank]:
            _DO[action.kind](self, action)
        for key in list(self.going):
            self._wait_sent(*key)
        self._update()
        outputs = self._outputs()
        self.writer.graph.output(tuple(item for item, _ in outputs))
        root = nn.Module()
        for part in self.parts.values():
            root.add_module(part.name, part.module)
        module = fx.GraphModule(root, self.writer.graph)
        ports = tuple(port for _, port in outputs)
        return Program(whole.name, module, tuple(inputs), ports, tuple(self.parts.values()))

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
        self.known[stage, micro_batch] = {k: v for k, v in self._known(stage, micro_batch).items() if k in kept}

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
                given.append(then.get(port.path) or self.current[port.path])
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
            if any(index > action.micro_batch for index in found):
                raise DistributedError(
                    f"{port.path} changes in each micro-batch, and {self.pipeline.schedule} takes them in another order",
                    hint='choose another one: config.set_pipeline_schedule("1F1B")',
                )
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

    def _outputs(self) -> list[tuple[Any, Port]]:
        found: list[tuple[Any, Port]] = []
        items = output_nodes(self.cut.program.graph)
        for item, port in zip(items, self.cut.program.outputs, strict=True):
            if not isinstance(item, fx.Node):
                found.append((item, port))
            elif port.role is not Role.STATE:
                found.append((self._result(item, port), port))
            elif (made := self._new_state(port)) is not None:
                found.append((made, port))
        return found

    def _new_state(self, port: Port) -> fx.Node | None:
        """New state of this rank; what another rank also reads is sent to it. None for state that is not here."""
        maker = self.cut.maker(port)
        own = self._own(port)
        if maker is None:
            return own
        others = [
            rank for rank in range(self.pipeline.num_ranks) if rank != maker and port.path in self.cut.reads[rank]
        ]
        if maker == self.rank:
            assert own is not None
            for begun in [self.writer.send(own, rank, "update") for rank in others]:
                self.writer.wait(begun, "update")
        elif self.rank in others:
            like = self.current[port.path]
            name = f"{like.name}_new"
            return self.writer.arrived(self.writer.receive(like, maker, name, "update"), like, "update")
        return own

    def _own(self, port: Port) -> fx.Node | None:
        """What this rank has made of an output of the step."""
        key = port.role, port.path
        if key in self.made:
            return self.made[key]
        if (found := self.results.get(key)) is None:
            return None
        items = [found[index] for index in sorted(found)]
        is_batch = port.role in (Role.USER, Role.PROBE) or port.path in self.cut.split
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
        maker, own = self.cut.maker(port), self._own(port)
        if maker is None or not isinstance(described, TensorMeta) or self.cut.is_sent_to_all(port):
            assert own is not None
            return own
        described = replace(described, requires_grad=False)
        name = port.path.replace(".", "_")
        if self.cut.is_scalar(port):
            return self.writer.from_one(own if maker == self.rank else None, described, maker, f"{name}_of_all", "forward")
        last = self.cut.last_rank
        if maker == last == self.rank:
            assert own is not None
            return own
        if maker == self.rank:
            assert own is not None
            self.writer.wait(self.writer.send(own, last, "forward"), "forward")
        elif last == self.rank:
            return self.writer.arrived(self.writer.receive(item, maker, f"{name}_from_{maker}", "forward"), item, "forward")
        empty = replace(described, shape=(0, *described.shape[1:]))
        node = self.writer.op(_aten.empty_strided.default, ([*empty.shape], [*empty.stride]), empty, f"{name}_elsewhere")
        node.kwargs = {"dtype": empty.dtype, "device": empty.device}
        return node


class _Sum:
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
            self.list = self.writer.op(_aten._foreach_add.List, args, value(self.list), f"{name}_sum", "backward")
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
