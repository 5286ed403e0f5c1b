"""The step over several micro-batches: it splits the batch, calls the subgraphs, sums gradients, packs results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from monograph.capture.accumulation.first_buffers import TakenOver, take_over
from monograph.compat.ops import named_input
from monograph.errors import CaptureError
from monograph.ir.meta import TensorMeta, add_label, output_nodes, set_value, tensor_meta, value, write_op
from monograph.ir.port import Port, Role, gradient_path
from monograph.ir.program import Program
from monograph.ir.size_numbers import compute_sizes
from monograph.layout import Layout, contiguous_stride
from monograph.user_code.lines import Origin, warn_at_user_line


def compose(
    flat: Program,
    accumulate: Program,
    update: Program,
    *,
    steps: int,
    split: Collection[str],
    taken_over: Sequence[TakenOver] = (),
) -> Program:
    """The program that calls `accumulate` for each of `steps` micro-batches, and then `update`.

    Its ports are those of `flat` without GRAD; the inputs at the paths in `split` are `steps` times as long. Buffers that the
    step changes are `taken_over` first.
    """
    writer = _Writer(accumulate, update, steps, split)
    inputs = [port for port in flat.inputs if port.role is not Role.GRAD]
    nodes = [node for node in flat.graph.nodes if node.op == "placeholder"]
    for node, port in zip(nodes, flat.inputs, strict=True):
        if port.role is not Role.GRAD:
            writer.take(node, port)
    changed = {port.path for port in accumulate.outputs if port.role is Role.STATE}
    for taken in taken_over:
        own = replace(
            taken, paths=tuple(path for path in taken.paths if path in changed & set(writer.current))
        )
        writer.current |= take_over(writer.graph, own, writer.current)
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
    compute_sizes(writer.graph)
    module = fx.GraphModule(root, writer.graph)
    ports = tuple(port for _, port in wanted)
    return Program(flat.name, module, tuple(inputs), ports, (accumulate, update))


def whole_batch(part: Any, steps: int) -> Any:
    """What is known of an input that is split, from the description of a part."""
    if not isinstance(part, TensorMeta):
        return part
    return replace(part, shape=(part.shape[0] * steps, *part.shape[1:]))


@dataclass
class _Writer:
    """Writes the graph. `current` has the present value of each input by path."""

    accumulate: Program
    update: Program
    steps: int
    split: Collection[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    current: dict[str, fx.Node] = field(default_factory=dict)
    total: fx.Node | list[fx.Node] | None = None  # the gradients so far, a list
    summed: Sequence[str] = ()  # their paths
    made: dict[tuple[Role, str], list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    late: dict[tuple[Role, str], fx.Node] = field(default_factory=dict)

    def take(self, node: fx.Node, port: Port) -> None:
        """An input of the step."""
        placeholder = named_input(self.graph, node.name)
        described = value(node)
        set_value(placeholder, whole_batch(described, self.steps) if port.path in self.split else described)
        self.current[port.path] = placeholder

    def micro_step(self, index: int) -> None:
        """One micro-batch: new buffers, results, and its gradients added to the sum."""
        inputs = [self._input(port, index) for port in self.accumulate.inputs]
        name = f"micro_{index}"
        call = self._call(self.accumulate, inputs, name)
        self._add_gradients(call, name)
        for position, port in enumerate(self.accumulate.outputs):
            if port.role is Role.GRAD:
                continue
            item = self._item(call, position, f"{name}_{position}")
            if port.role is Role.STATE and port.path in self.current and port.path not in self.split:
                self.current[port.path] = item
                self.made[port.role, port.path] = [item]
            else:
                self.made[port.role, port.path].append(item)

    def update_step(self) -> None:
        """The optimizers' step, with the summed gradients."""
        inputs = [self._late_input(port) for port in self.update.inputs]
        call = self._call(self.update, inputs, "updated")
        for position, port in enumerate(self.update.outputs):
            self.late[port.role, port.path] = self._item(call, position, f"updated_{position}")

    def _late_input(self, port: Port) -> fx.Node:
        if port.role is not Role.GRAD:
            return self.current[port.path]
        position = self.summed.index(port.path)
        gradient = self._summed(position, f"gradient_{position}")
        add_label(gradient, port.path)
        return gradient

    def result(self, port: Port) -> fx.Node:
        """What the step gives at an output port: scalars stacked, batches joined, of state the last value."""
        key = port.role, port.path
        if key in self.late:
            return self.late[key]
        items = self.made[key]
        batch = port.role in (Role.USER, Role.PROBE) or port.path in {
            *self.split,
            *map(gradient_path, self.split),
        }
        described = value(items[0])
        if not batch or not isinstance(described, TensorMeta):
            return items[-1]
        name = port.path.replace(".", "_")
        if not described.shape:
            meta = replace(described, shape=(self.steps,), stride=(1,))
            return self._node(torch.ops.aten.stack.default, (items,), f"stacked_{name}", meta)
        if port.role is Role.USER:
            self._warn_if_no_batch(described)
        return self._node(
            torch.ops.aten.cat.default, (items,), f"joined_{name}", joined(described, self.steps)
        )

    def _warn_if_no_batch(self, result: TensorMeta) -> None:
        batches = [value(node) for path, node in self.current.items() if path in self.split]
        rows = {batch.shape[0] // self.steps for batch in batches if isinstance(batch, TensorMeta)}
        if result.shape[0] == 1 or any(count and result.shape[0] % count == 0 for count in rows):
            return
        one, rest = list(result.shape), list(result.shape[1:])
        warn_at_user_line(
            f"a result of shape {one} is no batch of the micro-batches: {self.steps} of them are joined to "
            f"{[one[0] * self.steps, *rest]}; return x.unsqueeze(0) for {[self.steps, *one]}"
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

    def _call(self, part: Program, inputs: Sequence[fx.Node], name: str) -> fx.Node:
        call = self.graph.create_node("call_module", part.name, tuple(inputs), {}, name=name)
        outputs = output_nodes(part.graph)
        set_value(call, tuple(value(item) if isinstance(item, fx.Node) else None for item in outputs))
        return call

    def _item(self, source: fx.Node, position: int | slice, name: str) -> fx.Node:
        described = value(source)
        assert isinstance(described, tuple)
        return self._node(getitem, (source, position), name, described[position])

    def _add_gradients(self, call: fx.Node, name: str) -> None:
        """As autograd does: the first gradient of a parameter is taken as it is, later ones are added in order."""
        for first, paths in rounds(self.accumulate.outputs):
            taken = slice(first, first + len(paths))
            if self.total is not None and paths != self.summed:
                self._add_some(call, first, paths, name)
                continue
            gradients = self._item(call, taken, f"{name}_gradients_{first}")
            if self.total is None:
                self.total, self.summed = gradients, paths
            else:
                self.total = self._sum(self.total, gradients, f"{name}_sum_{first}")

    def _add_some(self, call: fx.Node, first: int, paths: Sequence[str], name: str) -> None:
        """A backward() that reaches some of the parameters only."""
        total = [self._summed(k, f"{name}_before_{first}_{k}") for k in range(len(self.summed))]
        chosen = [self.summed.index(path) for path in paths]
        added = self._item(call, slice(first, first + len(paths)), f"{name}_part_{first}")
        sums = self._sum([total[k] for k in chosen], added, f"{name}_sum_{first}")
        for position, k in enumerate(chosen):
            total[k] = self._item(sums, position, f"{name}_after_{first}_{k}")
        self.total = total

    def _sum(self, old: fx.Node | list[fx.Node], added: fx.Node, name: str) -> fx.Node:
        target = torch.ops.aten._foreach_add.List
        return self._node(target, (old, added), name, value(added), "backward")

    def _summed(self, position: int, name: str) -> fx.Node:
        assert self.total is not None
        if isinstance(self.total, list):
            return self.total[position]
        return self._item(self.total, position, name)

    def _node(
        self, target: Any, args: tuple[Any, ...], name: str, described: Any, phase: str = "forward"
    ) -> fx.Node:
        return write_op(self.graph, target, args, described, Origin(phase=phase), name)


def joined(part: TensorMeta, count: int) -> TensorMeta:
    """What `cat` makes of `count` such tensors: the layout of the result is its choice.

    It keeps the order in which images are in memory, and no other.
    """
    if part.varies:
        shape = (part.shape[0] * count, *part.shape[1:])
        if len(shape) not in (4, 5) or part.stride == contiguous_stride(part.shape):
            return replace(part, shape=shape, stride=contiguous_stride(shape))
        if len(shape) == 4 and part.stride == Layout.channels_last(*part.shape).stride:
            return replace(part, shape=shape, stride=Layout.channels_last(*shape).stride)
        raise CaptureError("results of micro-batches are joined whose sizes vary, in an order of their own")
    example = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
    return replace(tensor_meta(torch.cat([example] * count)), device=part.device)


def rounds(outputs: Sequence[Port]) -> Iterator[tuple[int, list[str]]]:
    """The gradients among the outputs of a micro-step, one round for each time that backward() left some.

    Gives the position of the first of a round, and their paths; no path is twice in one round.
    """
    paths: list[str] = []
    for position, port in enumerate(outputs):
        if port.role is Role.GRAD and port.path in paths:
            yield position - len(paths), paths
            paths = []
        if port.role is Role.GRAD:
            paths.append(port.path)
    if paths:
        yield len(outputs) - len(paths), paths
