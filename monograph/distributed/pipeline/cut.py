"""A micro-batch cut into the forward and backward parts of stages, and what goes from one stage to the next."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from operator import getitem

from torch import fx

from monograph.compat.distributed.pipelining import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from monograph.distributed.pipeline.parts import Part, check_sent, part_of
from monograph.distributed.pipeline.placing import Place, Placing
from monograph.distributed.pipeline.stages import Pipeline
from monograph.errors import DistributedError
from monograph.ir.meta import needed_by
from monograph.ir.port import Port, Role
from monograph.ir.program import Program

_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
}


class MicroBatch:
    """The ops of a micro-batch by stage. A value that a later stage reads goes from neighbour to neighbour."""

    def __init__(self, program: Program, pipeline: Pipeline) -> None:
        self.program, self.pipeline = program, pipeline
        self.placing = Placing(program, pipeline)
        self.place, self.ports = self.placing.place, self.placing.ports
        self._last: dict[
            fx.Node, int
        ] = {}  # the last stage whose forward gets a value, and the first whose backward does
        self._first: dict[fx.Node, int] = {}
        self._in: dict[Place, list[fx.Node]] = {}
        for node, place in self.place.items():
            self._in.setdefault(place, []).append(node)
            for item in node.all_input_nodes:
                if item in self.place:
                    self._note(item, self.place[item], place)
        self.part = cache(self._part)
        self.check()

    def _note(self, item: fx.Node, made: Place, read: Place) -> None:
        if not made.is_backward and read.stage > made.stage:
            self._last[item] = max(self._last.get(item, 0), read.stage)
        elif read.stage < made.stage:
            self._first[item] = min(self._first.get(item, made.stage), read.stage)

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        """The place of each op."""
        return {node: index for index, node in enumerate(self.placing.nodes)}

    @cached_property
    def _forward_edges(self) -> list[list[fx.Node]]:
        edges: list[list[fx.Node]] = [[] for _ in range(self.pipeline.num_stages)]
        for node in sorted(self._last, key=self.order.__getitem__):
            check_sent(node)
            for stage in range(self.place[node].stage, self._last[node]):
                edges[stage].append(node)
        return edges

    @cached_property
    def _backward_edges(self) -> list[list[fx.Node]]:
        edges: list[list[fx.Node]] = [[] for _ in range(self.pipeline.num_stages)]
        for node in sorted(self._first, key=self.order.__getitem__):
            check_sent(node)
            for stage in range(self._first[node] + 1, self.place[node].stage + 1):
                edges[stage].append(node)
        return edges

    def sent_forward(self, stage: int) -> list[fx.Node]:
        """What a stage gives to the one after it."""
        return self._forward_edges[stage]

    def sent_backward(self, stage: int) -> list[fx.Node]:
        """What a stage gives to the one before it."""
        return self._backward_edges[stage]

    def _part(self, kind: str, stage: int) -> Part | None:
        """The forward, the backward, or a half of that: for the gradients that are sent, and the rest. None if it is empty."""
        place = Place(stage, kind != FORWARD)
        nodes = set(self._in.get(place, ()))
        if kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
            sent = [node for node in self.sent_backward(stage) if node in nodes]
            first = needed_by(sent) & nodes
            first |= {node for node in nodes if node.target is getitem and node.args[0] in first}
            nodes = first if kind == BACKWARD_INPUT else nodes - first
        results = list(self._results(nodes, place))
        passed = list(self._read_elsewhere(nodes, with_gradients=kind == BACKWARD_INPUT))
        gradients = [] if kind in (FORWARD, BACKWARD_INPUT) else list(self.gradients(stage))
        made = [*results, *((node, None) for node in passed), *gradients]
        if not (nodes or made):
            return None
        body = self.placing.closure([*nodes, *(item for item, _ in results)])
        return part_of(f"{_NAMES[kind]}_{stage}", self.program, body, self.ports, made)

    def _results(self, nodes: set[fx.Node], place: Place) -> Iterator[tuple[fx.Node, Port | None]]:
        for item, port in self.placing.outputs:
            if port.role is Role.GRAD or not isinstance(item, fx.Node):
                continue
            if item in nodes or (item not in self.place and self.stage_of(item, port) == place):
                yield item, port

    def stage_of(self, item: fx.Node, port: Port) -> Place:
        """Where a result is made."""
        return self.placing.place_of_result(item, port)

    def gradients(self, stage: int) -> Iterator[tuple[fx.Node, Port | None]]:
        """The gradients of parameters that a stage makes."""
        for item, port in self.placing.outputs:
            if port.role is Role.GRAD and self.stage_of(item, port).stage == stage:
                yield item, port

    def _read_elsewhere(self, nodes: set[fx.Node], *, with_gradients: bool) -> Iterator[fx.Node]:
        for node in self.placing.nodes:
            if node in nodes and (
                node in self._last
                or node in self._first
                or any(reader in self.place and reader not in nodes for reader in node.users)
                or (with_gradients and node in self._gradients)
            ):
                yield node

    @cached_property
    def _gradients(self) -> set[fx.Node]:
        return {item for item, port in self.placing.outputs if port.role is Role.GRAD}

    @cache  # noqa: B019
    def read_by(self, stage: int) -> frozenset[str]:
        """The paths of the inputs that a stage reads."""
        nodes = [*self._in.get(Place(stage), ()), *self._in.get(Place(stage, is_backward=True), ())]
        results = [item for item, port in self.placing.outputs if self._is_here(item, port, stage)]
        found = self.placing.closure([*nodes, *results])
        return frozenset(self.ports[node].path for node in found if node in self.ports)

    def _is_here(self, item: object, port: Port, stage: int) -> bool:
        return isinstance(item, fx.Node) and self.stage_of(item, port).stage == stage

    @cached_property
    def changed(self) -> dict[str, int]:
        """The stage of each state that a micro-batch changes, by path."""
        return {
            port.path: self.stage_of(item, port).stage
            for item, port in self.placing.outputs
            if port.role is Role.STATE and isinstance(item, fx.Node)
        }

    def check(self) -> None:
        """Raise DistributedError for a step that cannot be cut so. All ranks look at all stages, so that all raise it."""
        for path, stage in self.changed.items():
            for other in range(self.pipeline.num_stages):
                if other != stage and path in self.read_by(other):
                    raise DistributedError(
                        f"{path} is changed in stage {stage} for each micro-batch, and stage {other} reads it",
                        hint="let one stage change and read it",
                    )
        orders = self.pipeline.orders
        for action in (action for actions in orders.actions for action in actions):
            if action.kind in _NAMES and action.micro_batch == 0:
                self.part(action.kind, action.stage)
        for item, port in self.placing.outputs:
            if port.role is not Role.STATE or not isinstance(item, fx.Node):
                continue
            place = self.stage_of(item, port)
            kinds = (BACKWARD, BACKWARD_WEIGHT) if place.is_backward else (FORWARD,)
            own = [
                action.micro_batch
                for action in orders.actions[orders.ranks[place.stage]]
                if action.stage == place.stage and action.kind in kinds
            ]
            if own != sorted(own):
                raise DistributedError(
                    f"{port.path} changes in each micro-batch, and {self.pipeline.schedule} takes them in another order",
                    hint='choose another one: config.set_pipeline_schedule("1F1B")',
                )
