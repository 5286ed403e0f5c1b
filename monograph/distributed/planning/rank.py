"""The step of one rank of many, captured and planned in a process that takes itself for that rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from monograph.backends.aten import plan_to_run
from monograph.capture.captured import Captured
from monograph.capture.step.request import Request
from monograph.capture.trace import capture
from monograph.compat.distributed.fake_group import pretend_to_be
from monograph.compat.distributed.groups import grid_of_all, group_size, ranks_in, shared_name
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.modes import outside_of_modes
from monograph.compiler import planned
from monograph.distributed.planning.events import Begin, Post, steps_of
from monograph.distributed.planning.mesh import Mesh
from monograph.distributed.planning.order import RankSteps
from monograph.distributed.planning.partial import check_awaited, check_whole
from monograph.distributed.programs.collectives import groups_in
from monograph.distributed.zero import ZERO_DIM
from monograph.inspect.memory.holders import holders
from monograph.internals.internals import Arguments, Internals
from monograph.internals.together import Together, prepare
from monograph.ir.call.dims import dims_in, example_sizes, with_sizes
from monograph.ir.call.signature import Call
from monograph.passes.run import Stage
from monograph.plan.plan import Plan
from monograph.runnable import order_of
from monograph.settings import DataParallel, Settings
from monograph.state.find import average_slots, module_slots, optimizer_slots, tensor_paths


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over one dimension of the mesh, and the bytes that a rank sends for them in a step."""

    collective: str
    dimension: str
    count: int
    payload_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """What a rank holds and sends in a step. `like` is the number of ranks that it stands for: they hold no more.

    `peak_bytes` is what the step holds when it holds most, above state and arguments.
    """

    rank: int
    like: int
    peak_bytes: int
    state_bytes: int
    argument_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    num_ops: int
    sent: tuple[Sent, ...]

    @property
    def total_bytes(self) -> int:
        """All at the peak."""
        return self.peak_bytes + self.state_bytes + self.argument_bytes

    @property
    def payload_bytes(self) -> int:
        """All that it sends in a step."""
        return sum(item.payload_bytes for item in self.sent)


@dataclass(frozen=True)
class Planned:
    """The plan of a rank, what it does in a step, and the numbers of rows of what ranks hold parts of."""

    plan: RankPlan
    steps: RankSteps
    rows: frozenset[int]


class _Alone(Together):
    """Nobody is there to agree with."""

    def begin(self, request: Request) -> None:
        pass


def plan_rank(graph: Internals, arguments: Arguments, mesh: Mesh, rank: int, settings: Settings) -> Planned:
    """The plan of the step of a rank. This process is that rank from now on: for child processes."""
    pretend_to_be(rank, mesh.size)
    grid = None if len(mesh.sizes) == 1 else grid_of_all("cpu", mesh.sizes, (*mesh.names[:-1], ZERO_DIM))
    graph.registry.config.settings = replace(settings, data_parallel=DataParallel(grid))
    captured, _ = captured_step(graph, arguments)
    made = planned(Stage("capture", captured.program, 0.0), settings.plain())[1]
    shared = captured.guards.shared_with_arguments
    plan = plan_to_run(order_of(captured.for_good(), made, settings.plain(), shared=shared))
    check_awaited(plan.program)
    parts, rows = _in_parts(graph)
    alone = [name for name in groups_in(captured.program) if group_size(name) == 1]
    # before several values become one
    check_whole(captured.program, parts, lambda joined: _covers(mesh, joined), alone)
    groups = {name: ranks_in(name) for name in groups_in(plan.program)}
    steps = RankSteps(steps_of(plan.program, group_size), groups)
    return Planned(rank_plan(rank, plan, steps, mesh), steps, rows)


def rank_plan(rank: int, plan: Plan, steps: RankSteps, mesh: Mesh) -> RankPlan:
    """What a rank holds by the plan of its step."""
    kinds: dict[str, int] = defaultdict(int)
    for item in holders(plan, plan.memory):
        kinds[item.kind] += item.nbytes
    return RankPlan(
        rank,
        1,
        peak_bytes=plan.memory.peak_bytes,
        state_bytes=plan.memory.state_bytes,
        argument_bytes=plan.memory.argument_bytes,
        parameter_bytes=kinds["parameters"],
        optimizer_bytes=kinds["optimizer state"],
        num_ops=len(list(plan.program.ops())),
        sent=tuple(_sent(steps.events, steps.groups, mesh)),
    )


def captured_step(graph: Internals, arguments: Arguments) -> tuple[Captured, Call]:
    """The step as it is captured, and the call that it is for; nothing is made to run."""
    graph.together = _Alone()
    if dims_in(arguments):
        arguments = with_sizes(arguments, example_sizes(arguments, graph.settings.accumulation_steps))
    call = graph.read(*arguments)
    with graph.in_build(), outside_of_modes():
        request = graph.request(call)
        prepare(request, graph.together)
        return capture(request), call


def _in_parts(graph: Internals) -> tuple[Mapping[str, frozenset[str]], frozenset[int]]:
    """By path the state of which ranks hold parts, with the groups over which they do; and the rows that are shared out."""
    owned = graph.owned()
    modules = owned.named_modules()
    names = tensor_paths(modules)
    slots = [*module_slots(modules)]
    for registered in owned.optimizers:
        slots += optimizer_slots(registered, registered.optimizer.state, names)
    for average in owned.averages:
        slots += average_slots(average)
    parts: dict[str, frozenset[str]] = {}
    rows = set[int]()
    for slot in slots:
        tensor = slot.tensor
        if is_sharded(tensor) and tensor.placements[-1].is_shard():  # type: ignore[attr-defined]
            grid = tensor.device_mesh  # type: ignore[attr-defined]
            parts[slot.path] = frozenset({shared_name(grid.get_group(grid.ndim - 1))})
            rows.add(int(tensor.shape[0]))
    return parts, frozenset(rows)


def _covers(mesh: Mesh, joined: Collection[str]) -> bool:
    """True if what is put together over groups of these names comes of all ranks."""
    along = {dim for name in joined for dim in mesh.along(ranks_in(name))}
    return along >= {dim for dim, size in enumerate(mesh.sizes) if size > 1}


def _sent(events: Collection[object], groups: Mapping[str, tuple[int, ...]], mesh: Mesh) -> Iterator[Sent]:
    found: dict[tuple[str, str], list[int]] = {}
    for event in events:
        if isinstance(event, Begin):
            key = event.transfer.op, mesh.label(groups[event.transfer.group])
            found.setdefault(key, []).append(event.transfer.payload_bytes)
        elif isinstance(event, Post):
            for message in event.sends:
                found.setdefault(("send", mesh.label(groups[event.group])), []).append(message.nbytes)
    for (collective, dimension), sizes in found.items():
        yield Sent(collective, dimension, len(sizes), sum(sizes))
