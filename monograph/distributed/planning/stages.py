"""The steps of the ranks of a pipeline: the step is captured once, and cut for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from monograph.backends import LoweringRequest
from monograph.backends.aten import plan_to_run
from monograph.capture.accumulation.batches import batch_paths
from monograph.capture.ports import taken_over
from monograph.compat.distributed.fake_group import pretend_to_be
from monograph.compat.distributed.groups import grid_of_all, group_size, ranks_in
from monograph.compiler import planned
from monograph.distributed.columns import STAGES_DIM
from monograph.distributed.pipeline.bound import pipeline_of
from monograph.distributed.pipeline.rank import of_rank
from monograph.distributed.pipeline.spread import Spread
from monograph.distributed.planning.events import Steps, steps_of
from monograph.distributed.planning.mesh import Mesh
from monograph.distributed.planning.order import RankSteps
from monograph.distributed.planning.partial import check_awaited
from monograph.distributed.planning.rank import RankPlan, captured_step, rank_plan
from monograph.distributed.programs.collectives import groups_in
from monograph.distributed.replicas import replicas_of
from monograph.internals.internals import Arguments, Internals
from monograph.ir.program import Program
from monograph.passes.run import Stage
from monograph.plan.plan import Plan
from monograph.settings import DataParallel, Settings

_MOST_PLANNED: Final = 8  # ranks whose memory is planned: of more the first, the last and one in the middle


@dataclass(frozen=True)
class PlannedStages:
    """The plans of some ranks, and what all do in a step."""

    plans: tuple[RankPlan, ...]
    steps: Mapping[int, RankSteps]


def kinds_of_copies(mesh: Mesh, settings: Settings) -> Mapping[int, int]:
    """The copies of a pipeline to plan, and for each how many are like it, or hold less: of rows the first has the most."""
    copies = mesh.size // mesh.sizes[-1]
    return {0: copies} if settings.zero is None or copies == 1 else {0: copies - 1, copies - 1: 1}


def plan_stages(
    graph: Internals, arguments: Arguments, mesh: Mesh, settings: Settings, copy: int = 0
) -> PlannedStages:
    """The plans of the ranks of a pipeline, or of one of its copies. For child processes."""
    count = mesh.sizes[-1]
    first = copy * count
    config = graph.registry.config
    config.settings = replace(settings, stages=())  # the step of all, which is cut here
    if len(mesh.sizes) == 1:
        config.settings = replace(config.settings, zero=None, data_parallel=None)
        captured, call = captured_step(graph, arguments)
        pretend_to_be(first, mesh.size)
    else:
        pretend_to_be(first, mesh.size)
        grid = grid_of_all("cpu", mesh.sizes, (mesh.names[0], STAGES_DIM))
        config.settings = replace(config.settings, data_parallel=DataParallel(grid[mesh.names[0]]))
        settings = replace(settings, data_parallel=DataParallel(grid))
        captured, call = captured_step(graph, arguments)
    owned = graph.owned()
    modules = owned.named_modules()
    pipeline = pipeline_of(owned, modules, settings)
    assert pipeline is not None
    buffers = taken_over(replicas_of(owned, modules, config.settings))
    spread = Spread(captured.program, pipeline, batch_paths(call), buffers)
    is_small = count <= _MOST_PLANNED
    chosen = range(count) if is_small else (0, count // 2, count - 1)
    steps: dict[int, RankSteps] = {}
    plans: list[RankPlan] = []
    for stage in range(count):
        rank, program = first + stage, of_rank(spread, stage)
        check_awaited(program)
        plan = _plan_of(program, settings.plain()) if stage in chosen else None
        # all as they run, or all as they are cut: else some would have merged collectives, and others not
        program = plan.program if plan is not None and is_small else program
        events = steps_of(program, group_size, {pipeline.group}).events
        groups = {name: mesh.like(ranks_in(name), rank) for name in (pipeline.group, *groups_in(program))}
        steps[rank] = RankSteps(Steps(events, {}), groups)  # each has state of its own
        if plan is not None:
            plans.append(rank_plan(rank, plan, steps[rank], mesh))
    return PlannedStages(tuple(plans), steps)


def _plan_of(program: Program, settings: Settings) -> Plan:
    """The plan by which it runs op by op, its updates in place."""
    plan = planned(Stage("capture", program, 0.0), settings)[1]
    return plan_to_run(LoweringRequest(plan, settings, frozenset(plan.in_place)))
