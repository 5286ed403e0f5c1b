"""The step over several micro-batches: it splits the batch, calls the parts, sums gradients, packs results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from monograph.errors import Origin
from monograph.ir.meta import TensorMeta, output_nodes, set_origin, set_value, value
from monograph.ir.port import Port, Role, gradient_path
from monograph.ir.program import Program


def compose(
    flat: Program, accumulate: Program, update: Program, *, steps: int, split: Collection[str]
) -> Program:
    """The program that calls `accumulate` for each of `steps` micro-batches, and then `update`.

    Its ports are those of `flat` without GRAD; the inputs at the paths in `split` are `steps` times as long.
    """
    writer = _Writer(accumulate, update, steps, split)
    inputs = [port for port in flat.inputs if port.role is not Role.GRAD]
    nodes = [node for node in flat.graph.nodes if node.op == "placeholder"]
    for node, port in zip(nodes, flat.inputs, strict=True):
        if port.role is not Role.GRAD:
            writer.take(node, port)
    for index in range(steps):
        writer.micro_step(index)
    writer.update_step()
    outputs = zip(output_nodes(flat.graph), flat.outputs, strict=True)
    wanted = [(item, port) for item, port in outputs if port.role is not Role.GRAD]
    results = tuple(writer.result(port) if isinstance(item, fx.Node) else item for item, port in wanted)
    writer.graph.output(results)
    root = nn.Module()
    root.add_module(accumulate.name, accumulate.module)
    root.add_module(update.name, update.module)
    module = fx.GraphModule(root, writer.graph)
    ports = tuple(port for _, port in wanted)
    return Program(flat.name, module, tuple(inputs), ports, (accumulate, update))


@dataclass
class _Writer:
    """Writes the graph. `current` has the present value of each input by path."""

    accumulate: Program
    update: Program
    steps: int
    split: Collection[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    current: dict[str, fx.Node] = field(default_factory=dict)
    sums: dict[str, fx.Node] = field(default_factory=dict)  # gradients so far, by path
    made: dict[tuple[Role, str], list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    late: dict[tuple[Role, str], fx.Node] = field(default_factory=dict)

    def take(self, node: fx.Node, port: Port) -> None:
        """An input of the step."""
        placeholder = self.graph.placeholder(node.name)
        described = value(node)
        if port.path in self.split and isinstance(described, TensorMeta):
            described = replace(described, shape=(described.shape[0] * self.steps, *described.shape[1:]))
        set_value(placeholder, described)
        self.current[port.path] = placeholder

    def micro_step(self, index: int) -> None:
        """One micro-batch: new buffers, results, and its gradients added to the sum."""
        inputs = [self._input(port, index) for port in self.accumulate.inputs]
        outputs = self._call(self.accumulate, inputs, f"micro_{index}")
        for port, item in zip(self.accumulate.outputs, outputs, strict=True):
            if port.role is Role.GRAD:
                self._add(port.path, item, index)
            elif port.role is Role.STATE and port.path in self.current and port.path not in self.split:
                self.current[port.path] = item
                self.made[port.role, port.path] = [item]
            else:
                self.made[port.role, port.path].append(item)

    def update_step(self) -> None:
        """The optimizers' step, with the summed gradients."""
        inputs = [
            self.sums[port.path] if port.role is Role.GRAD else self.current[port.path]
            for port in self.update.inputs
        ]
        outputs = self._call(self.update, inputs, "updated")
        for port, item in zip(self.update.outputs, outputs, strict=True):
            self.late[port.role, port.path] = item

    def result(self, port: Port) -> fx.Node:
        """What the step gives at an output port: scalars stacked, batches joined, of state the last value."""
        key = port.role, port.path
        if key in self.late:
            return self.late[key]
        items = self.made[key]
        batch = port.role is Role.USER or port.path in {*self.split, *map(gradient_path, self.split)}
        described = value(items[0])
        if not batch or not isinstance(described, TensorMeta):
            return items[-1]
        name = port.path.replace(".", "_")
        if not described.shape:
            meta = replace(described, shape=(self.steps,), stride=(1,))
            return self._node(torch.ops.aten.stack.default, (items,), f"stacked_{name}", meta)
        shape = (described.shape[0] * self.steps, *described.shape[1:])
        return self._node(
            torch.ops.aten.cat.default, (items,), f"joined_{name}", replace(described, shape=shape)
        )

    def _input(self, port: Port, index: int) -> fx.Node:
        whole = self.current[port.path]
        described = value(whole)
        if port.path not in self.split or not isinstance(described, TensorMeta):
            return whole
        size = described.shape[0] // self.steps
        meta = replace(described, shape=(size, *described.shape[1:]))
        arguments = (whole, 0, index * size, (index + 1) * size)
        return self._node(torch.ops.aten.slice.Tensor, arguments, f"{whole.name}_{index}", meta)

    def _call(self, part: Program, inputs: Sequence[fx.Node], name: str) -> list[fx.Node]:
        described = tuple(
            value(item) if isinstance(item, fx.Node) else None for item in output_nodes(part.graph)
        )
        call = self.graph.create_node("call_module", part.name, tuple(inputs), {}, name=name)
        set_value(call, described)
        return [
            self._node(getitem, (call, position), f"{name}_{position}", meta)
            for position, meta in enumerate(described)
        ]

    def _add(self, path: str, gradient: fx.Node, index: int) -> None:
        """As autograd does: the first gradient is taken as it is, later ones are added."""
        if path not in self.sums:
            self.sums[path] = gradient
            return
        before = self.sums[path]
        self.sums[path] = self._node(
            torch.ops.aten.add.Tensor,
            (before, gradient),
            f"sum_{index}_{len(self.graph.nodes)}",
            value(before),
            "backward",
        )

    def _node(
        self, target: Any, args: tuple[Any, ...], name: str, described: Any, phase: str = "forward"
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, {}, name=name)
        set_value(node, described)
        set_origin(node, Origin(phase=phase))
        return node
