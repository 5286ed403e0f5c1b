"""Gradient accumulation: a captured micro-step becomes two programs, and the step that calls them.

`accumulate` computes the gradients of one micro-batch; `update` takes their sum to new parameters and optimizer
state. What depends on the summed gradients, and what optimizers do, is the update; all else is done for each
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx

from monograph.capture.accumulation.first_buffers import TakenOver
from monograph.capture.accumulation.steps import compose, whole_batch
from monograph.compat.ops import is_random
from monograph.errors import CaptureError
from monograph.ir.meta import ScalarMeta, TensorMeta, is_late, needed_by, origin, output_nodes, set_value
from monograph.ir.meta import value as described
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.size_numbers import compute_sizes, numbers_of_sizes, sizes_of
from monograph.sizes.place import size_places
from monograph.sizes.size import Size


def two_programs(
    program: Program,
    *,
    steps: int,
    split: Collection[str],
    moved: Collection[str] = (),
    taken_over: Sequence[TakenOver] = (),
) -> Program:
    """The step over `steps` micro-batches.

    `program` is one micro-step: its GRAD inputs are the summed gradients, its GRAD outputs those of the micro-batch.
    `split` are the paths of the inputs that are batches, `moved` those of state that changes before `backward()` is
    done, `taken_over` buffers that are those of the first process before.
    """
    cut = _Cut(program, split, moved, steps)
    parts = cut.accumulate(), cut.update()
    return compose(program, *parts, steps=steps, split=split, taken_over=taken_over)


@dataclass
class _Cut:
    """Which nodes of a micro-step belong to its update."""

    program: Program
    split: Collection[str]
    moved: Collection[str]
    steps: int

    def __post_init__(self) -> None:
        nodes = list(self.program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.ports = dict(zip(placeholders, self.program.inputs, strict=True))
        self.outputs = list(zip(output_nodes(self.program.graph), self.program.outputs, strict=True))
        self.sums = self._inputs(lambda port: port.role is Role.GRAD)
        self.late = _reached(
            nodes, self.sums, also={node for node in nodes if _updates(node)} | self._late_weights()
        )
        self.once = self.late | self.sums  # what is there once in a step
        batches = self._inputs(lambda port: port.path in self.split)
        self.numbers = numbers_of_sizes(self.program.graph)  # the same ones in each micro-batch
        self.of_batch = _reached([node for node in nodes if node not in self.numbers], batches) | batches
        self.renewed = {
            value: port.path
            for value, port in self.outputs
            if isinstance(value, fx.Node) and value not in self.late and port.role is Role.STATE
        }
        inputs = {port.path: node for node, port in self.ports.items()}
        # state that a micro-batch changes comes to the update as its input
        self.fakes = {node: inputs[path] for node, path in self.renewed.items() if path in inputs}
        self._check_state()
        self.sizes: dict[fx.Node, int] = {}  # that the update computes with
        self.borrowed = self._borrowed()
        self.drawn = {node for node in self.borrowed if is_random(node.target)}
        self._check_random()

    def _inputs(self, wanted: Callable[[Port], bool]) -> set[fx.Node]:
        return {node for node, port in self.ports.items() if wanted(port)}

    def _late_weights(self) -> set[fx.Node]:
        """New values of parameters that change after the last backward() only: decay by hand is done once."""
        weights = {port.path for port in self.ports.values() if port.role is Role.PARAM} - set(self.moved)
        news = [value for value, port in self.outputs if port.role is Role.STATE and port.path in weights]
        return {value for value in news if isinstance(value, fx.Node)}

    def _borrowed(self) -> set[fx.Node]:
        """What the update needs besides: computed from state alone, so that it is computed again, once."""
        found: set[fx.Node] = set()
        changed = set(self.renewed.values())
        pending = [(needed, reader) for reader in self.late for needed in reader.all_input_nodes]
        while pending:
            node, reader = pending.pop()
            if node in self.late or node in found or node in self.fakes:
                continue
            if node in self.numbers:
                self.sizes |= sizes_of([node])
                continue
            if node in self.of_batch:
                raise _refused(reader, "the update depends on values of a single micro-batch")
            if node.op != "placeholder":
                found.add(node)
                pending += [(needed, node) for needed in node.all_input_nodes]
            elif self.ports[node].path in changed:
                path = self.ports[node].path
                raise _refused(reader, f"the update reads {path} as it was before the micro-batch changed it")
        return found

    def _check_state(self) -> None:
        """Nothing is changed for each micro-batch and again once."""
        for value, port in self.outputs:
            if port.role is Role.GRAD and value in self.once:
                raise _refused(value, "a gradient of a micro-batch depends on the summed ones")
            if port.role is Role.STATE and port.path in self.moved and self._is_late(value, port):
                raise _refused(
                    value,
                    f"{port.path} changes before backward() and again in the update",
                    hint="the one is done for each micro-batch and the other once: change it on one side only",
                )

            if port.role is Role.USER and value in self.of_batch and isinstance(described(value), ScalarMeta):
                raise _refused(
                    value,
                    "build() returns a Python number that each micro-batch has another of",
                    hint="return the tensor: it comes back with a value for each micro-batch",
                )

    def _check_random(self) -> None:
        """Random numbers of the update are drawn after the last gradient, and serve nothing else."""
        results = [value for value, port in self.outputs if not self._is_late(value, port)]
        early = needed_by(value for value in results if isinstance(value, fx.Node))
        gradients = {value for value, port in self.outputs if port.role is Role.GRAD}
        shared, waiting = self.drawn & early, list[fx.Node]()
        for node in self.program.graph.nodes:
            if node in shared:
                raise _refused(node, "the update and a micro-batch use the same random numbers")
            if node in self.drawn:
                waiting.append(node)
            if node in gradients and waiting:
                raise _refused(waiting[0], "the update uses random numbers that were drawn before backward()")

    def accumulate(self) -> Program:
        """The part that runs for each micro-batch."""
        outputs = [item for item in self.outputs if not self._is_late(*item)]
        late = self.late | self.drawn | _reached(self.program.graph.nodes, self.drawn)
        ordered = sorted(outputs, key=lambda item: item[1].role is Role.GRAD)
        return self._part("accumulate", [n for n in self.program.graph.nodes if n not in late], ordered, {})

    def update(self) -> Program:
        """The part that runs once."""
        outputs = [item for item in self.outputs if self._is_late(*item)]
        kept = self.late | self.borrowed
        nodes = [node for node in self.program.graph.nodes if node in kept]
        update = self._part("update", nodes, outputs, self.fakes, self.sizes)
        compute_sizes(update.graph)
        return update

    def _is_late(self, value: Any, port: Port) -> bool:
        return port.role is not Role.GRAD and isinstance(value, fx.Node) and value in self.once

    def _part(
        self,
        name: str,
        kept: Iterable[fx.Node],
        outputs: list[tuple[Any, Port]],
        fakes: Mapping[fx.Node, fx.Node],
        sizes: Mapping[fx.Node, int] = MappingProxyType({}),
    ) -> Program:
        """With `sizes` in place of the nodes that compute them; their batches come whole then."""
        graph, copies, ports = fx.Graph(), dict[fx.Node, fx.Node](), []
        body = [node for node in kept if node.op not in ("placeholder", "output")]
        used = _used(body, outputs, fakes)
        known_by = self._inputs_with(sizes.values())
        for node, port in self.ports.items():
            if node in used or node in known_by:
                copies[node] = graph.node_copy(node)
                ports.append(port)
            if node in known_by and port.path in self.split:
                set_value(copies[node], whole_batch(described(node), self.steps))

        def copied(node: fx.Node) -> Any:
            return sizes[node] if node in sizes else copies[fakes.get(node, node)]

        for node in body:
            copies[node] = graph.node_copy(node, copied)
        graph.output(tuple(fx.map_arg(value, copied) for value, _ in outputs))
        module = fx.GraphModule(self.program.module, graph)
        named = [Port(f"{name}_{index}", port.role, port.path) for index, (_, port) in enumerate(outputs)]
        return Program(name, module, tuple(ports), tuple(named))

    def _inputs_with(self, sizes: Iterable[int]) -> set[fx.Node]:
        """Inputs from which these sizes can be computed."""
        inputs = list(self.ports)
        metas = map(described, inputs)
        places = size_places(item.shape if isinstance(item, TensorMeta) else () for item in metas)
        names = {name for size in sizes if isinstance(size, Size) for name in size.expression.names()}
        return {inputs[places[name].position] for name in names}


def _used(
    body: Iterable[fx.Node], outputs: Iterable[tuple[Any, Port]], fakes: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    found = {fakes.get(needed, needed) for node in body for needed in node.all_input_nodes}
    return found | {value for value, _ in outputs if isinstance(value, fx.Node)}


def _updates(node: fx.Node) -> bool:
    return node.op == "call_function" and is_late(node)


def _reached(
    nodes: Iterable[fx.Node],
    sources: Collection[fx.Node],
    also: Collection[fx.Node] = (),
) -> set[fx.Node]:
    """The nodes that depend on `sources`, and those in `also` with all that depend on them."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            needs = any(needed in found or needed in sources for needed in node.all_input_nodes)
            if needs or node in also:
                found.add(node)
    return found


def _refused(
    node: fx.Node,
    what: str,
    hint: str = "after backward() use gradients and state only; what is computed for each micro-batch can be returned",
) -> CaptureError:
    place = origin(node)
    return CaptureError(
        f"gradients cannot be accumulated over micro-batches: {what}",
        where=place if place.file else None,
        hint=hint,
    )
