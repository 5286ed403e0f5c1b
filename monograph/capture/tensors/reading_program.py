"""The ops that lead to the values that Python has asked for, as a small program beside that of the step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.known import part_that_makes, written_roots
from monograph.capture.numbers.random import draws, on_empty, with_draws_before
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.ops import named_input
from monograph.ir.meta import forget_torch_meta, needed_by
from monograph.user_code.lines import Origin

_aten = torch.ops.aten
Op = tuple[Any, ...]  # an op, and its arguments after the first
ITEM: Op = (_aten._local_scalar_dense.default,)


@dataclass(frozen=True)
class RecordedPart:
    """The recorded ops that lead to some tensors, with the values that they give."""

    made: list[fx.Node]
    needed: list[fx.Node]  # those, and draws that come before
    values: Mapping[fx.Node, Any]
    may_change: bool  # another step may have others


@dataclass(frozen=True)
class Reading:
    """One value that Python has asked for: an op of the trace in the making that gives a plain number."""

    name: str  # in conditions
    ops: tuple[Op, ...]  # one after the other; the first takes the arguments
    args: tuple[Any, ...]  # nodes in place of tensors
    part: RecordedPart
    after: fx.Node  # the last op that was recorded before
    where: Origin
    results: tuple[Any, ...]  # of the ops, described


class ReadingProgram:
    """The program of the readings of one trace, on the inputs of the step. `fill()` makes it, once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.inputs_read: set[int] = set()  # ids of those that readings depend on
        self._graph = fx.Graph()
        self._constants: dict[str, Any] = {}  # by their names in the graph
        self._numbers: dict[str, fx.Node] = {}  # by the names of readings

    def fill(self, readings: Sequence[Reading], tracer: Any, given: Mapping[fx.Node, Any]) -> None:
        """Copy the ops that lead to readings. `given` has the values of inputs that are known before the step."""
        made = {node for reading in readings for node in reading.part.made}
        needed = {node for reading in readings for node in reading.part.needed}
        written = written_roots(made)
        after: dict[fx.Node, list[Reading]] = {}
        for reading in readings:
            after.setdefault(reading.after, []).append(reading)
        inputs = dict(zip(placeholders(tracer.graph), self.inputs.items, strict=False))
        copies: dict[fx.Node, fx.Node] = {}
        for node in tracer.graph.nodes:
            if node in needed:
                if node in inputs:
                    self.inputs_read.add(id(inputs[node]))
                elif node.op == "get_attr":
                    name = str(node.target)
                    self._constants[name] = given.get(node, getattr(tracer.root, name))
                copies[node] = self._copied(node, copies, is_made=node in made)
                copies[node].meta = dict(node.meta)
                forget_torch_meta(copies[node])
                copies[node].meta |= {"draws": draws(node), "input": inputs.get(node)}
                if node in given and node in written:
                    held = copies[node]
                    copies[node] = self._graph.call_function(_aten.clone.default, (held,))
                    copies[node].meta = dict(held.meta)
            for reading in after.get(node, ()):
                self._add_number(reading, copies)

    def _copied(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node], *, is_made: bool) -> fx.Node:
        if node.op == "placeholder":
            return named_input(self._graph, node.name)
        if node.op == "get_attr":
            return self._graph.get_attr(str(node.target))
        if is_made:
            return self._graph.node_copy(node, copies.__getitem__)
        target: Any = node.target
        return self._graph.call_function(target, *on_empty(node, self._empty))

    def _add_number(self, reading: Reading, copies: Mapping[fx.Node, fx.Node]) -> None:
        number: Any = fx.map_arg(reading.args, copies.__getitem__)
        for (op, *others), result in zip(reading.ops, reading.results, strict=True):
            number = (self._graph.call_function(op, (*number, *map(self._placed, others))),)
            number[0].meta = {"value": result, "origin": reading.where}
        self._numbers[reading.name] = number[0]

    def _placed(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        name = f"expected_{len(self._constants)}"
        self._constants[name] = item
        return self._graph.get_attr(name)

    def _empty(self, shape: tuple[int, ...], strides: tuple[int, ...], **options: Any) -> fx.Node:
        return self._graph.call_function(_aten.empty_strided.default, (shape, strides), options)

    def positions(self, names: Collection[str]) -> set[int]:
        """The inputs of the step that some readings depend on."""
        return {self._position(node) for node in self._part(names) if node.op == "placeholder"}

    def _position(self, node: fx.Node) -> int:
        return next(i for i, item in enumerate(self.inputs.items) if item is node.meta["input"])

    def _part(self, names: Collection[str]) -> list[fx.Node]:
        """The recorded ops that some readings depend on, in order."""
        if not names:
            return []
        wanted = [self._numbers[name] for name in names]
        given = [node for node in self._graph.nodes if node.op in ("placeholder", "get_attr")]
        made = part_that_makes(wanted, given, lambda _node: True) or []
        drawn = with_draws_before(made, self._graph, lambda node: bool(node.meta.get("draws")))
        needed = needed_by(drawn)
        return [node for node in self._graph.nodes if node in needed]

    def copy_into(
        self,
        graph: fx.Graph,
        names: Collection[str],
        placed: Mapping[int, fx.Node],
        constants: dict[str, Any],
    ) -> dict[str, fx.Node]:
        """Add the ops that read some numbers to a graph whose inputs are `placed` by position."""
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._part(names):
            if node.op == "placeholder":
                copies[node] = placed[self._position(node)]
                copies[node].meta = {key: value for key, value in node.meta.items() if key != "input"}
            elif node.op == "get_attr":
                constants[f"read_{node.target}"] = self._constants[str(node.target)]
                copies[node] = graph.get_attr(f"read_{node.target}")
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return {name: copies[self._numbers[name]] for name in names}


def placeholders(graph: fx.Graph) -> Iterator[fx.Node]:
    """The inputs of a graph, in order."""
    return (node for node in graph.nodes if node.op == "placeholder")
