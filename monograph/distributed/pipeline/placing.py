"""Where each op of a micro-batch runs: in forward or backward of a stage, or wherever it is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import getitem

from torch import fx

from monograph.compat.distributed.ops import communicates
from monograph.distributed.pipeline.stages import Pipeline
from monograph.errors import DistributedError
from monograph.ir.memory import is_view
from monograph.ir.meta import needed_by, origin, output_nodes
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.passes.effects import acts


class _Named(str):
    """What an op reads, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True, slots=True)
class Place:
    """The forward or the backward part of a stage."""

    stage: int
    is_backward: bool = False


@dataclass
class Placing:
    """The ops of a micro-batch that something needs, each with its place; those without are copied to where they are read.

    A forward op is in the stage of its module, one of no stage in the last stage that it reads from. A backward op is in the
    stage of its module too, one of no stage where the gradients that it reads come from, and never before these.
    """

    program: Program
    pipeline: Pipeline
    place: dict[fx.Node, Place] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)  # those that are needed, in order

    def __post_init__(self) -> None:
        graph = self.program.graph
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.ports = dict(zip(self.placeholders, self.program.inputs, strict=True))
        self.outputs = list(zip(output_nodes(graph), self.program.outputs, strict=True))
        acting = [node for node in graph.nodes if node.op == "call_function" and acts(node)]
        results = [item for item, _ in self.outputs if isinstance(item, fx.Node)]
        needed = needed_by([*results, *acting])
        self.nodes = [
            node for node in graph.nodes if node in needed and node.op not in ("placeholder", "output")
        ]
        for node in self.nodes:
            if (found := self._place_of(node)) is not None:
                self.place[node] = found

    def place_of_result(self, item: fx.Node, port: Port) -> Place:
        """Where a result is made; one that any stage could make, in the stage of its state, or the last one."""
        if (found := self.place.get(item)) is not None:
            return found
        own = self.pipeline.stage_of(port.path.rpartition(".")[0]) if port.role is Role.STATE else None
        return Place(self.pipeline.num_stages - 1 if own is None else own, port.role is Role.GRAD)

    @property
    def digest(self) -> str:
        """SHA-256 of the ops, whatever stands between them that nothing needs: the same on all ranks.

        What is made of a collective does not count: copies of the model may keep other parts of that.
        """
        known = {node: f"<{port.path}>" for node, port in self.ports.items()}
        lines, parts = [], set[fx.Node]()
        for index, node in enumerate(self.nodes):
            known[node] = f"<{index}>"
            if not parts.isdisjoint(node.all_input_nodes):
                parts.add(node)
                continue
            if communicates(node.target):
                parts.add(node)
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda item: _Named(known[item]))
            lines.append(f"{node.op} {node.target} {args} {kwargs}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _place_of(self, node: fx.Node) -> Place | None:
        if node.op != "call_function":
            return None
        if node.target is getitem:
            return self.place.get(node.args[0])  # type: ignore[arg-type]
        read = [self.place[item] for item in node.all_input_nodes if item in self.place]
        stage = self.pipeline.stage_of(origin(node).module)
        does = acts(node)
        if not read and not does and (stage is None or is_view(node)):
            return None
        back = [place.stage for place in read if place.is_backward]
        if back or origin(node).phase == "backward":
            if stage is None:
                stage = min(back, default=max((place.stage for place in read), default=0))
            return Place(min([stage, *back]), is_backward=True)
        last = max((place.stage for place in read), default=0)
        if stage is None:
            return Place(last)
        if stage < last:
            raise self._against_the_flow(node, stage, last)
        return Place(stage)

    def _against_the_flow(self, node: fx.Node, stage: int, last: int) -> DistributedError:
        place = origin(node)
        sources = [item for item in node.all_input_nodes if item in self.place]
        source = next(item for item in sources if self.place[item].stage == last)
        by = origin(source).module
        made = f"module {by} of stage {last} makes" if by else f"stage {last} makes"
        return DistributedError(
            f"module {place.module} is in stage {stage}, and reads what {made}: a pipeline only goes forward",
            where=place if place.file else None,
            hint="give a module the stage of what it reads, or a later one",
        )

    def closure(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Ops, and all without a place that they need, inputs among them."""
        found: set[fx.Node] = set(nodes)
        pending = list(found)
        while pending:
            for item in pending.pop().all_input_nodes:
                if item not in self.place and item not in found:
                    found.add(item)
                    pending.append(item)
        return found
