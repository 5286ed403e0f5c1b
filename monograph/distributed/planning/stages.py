"""The steps of the ranks of a pipeline: the step is captured once, and cut for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from monograph.backends import LoweringRequest
from monograph.backends.aten import plan_to_run
from monograph.capture.accumulation.batches import batch_paths
from monograph.compat.distributed.fake_group import pretend_to_be
from monograph.compiler import planned
from monograph.distributed.pipeline.bound import pipeline_of
from monograph.distributed.pipeline.rank import of_rank
from monograph.distributed.pipeline.spread import Spread
from monograph.distributed.planning.events import Steps, steps_of
from monograph.distributed.planning.mesh import Mesh
from monograph.distributed.planning.order import RankSteps
from monograph.distributed.planning.partial import check_awaited
from monograph.distributed.planning.rank import RankPlan, captured_step, rank_plan
from monograph.internals.internals import Arguments, Internals
from monograph.ir.program import Program
from monograph.passes.run import Stage
from monograph.plan.plan import Plan
from monograph.settings import Settings

_MOST_PLANNED: Final = 8  # ranks whose memory is planned: of more the first, the last and one in the middle


@dataclass(frozen=True)
class PlannedStages:
    """The plans of some ranks, and what all do in a step."""

    plans: tuple[RankPlan, ...]
    steps: Mapping[int, RankSteps]


def plan_stages(graph: Internals, arguments: Arguments, mesh: Mesh, settings: Settings) -> PlannedStages:
    """The plans of the ranks of a pipeline. For child processes."""
    # the step of all, which is cut here
    graph.registry.config.settings = replace(settings, stages=(), zero=None, data_parallel=None)
    captured, call = captured_step(graph, arguments)
    pretend_to_be(0, mesh.size)
    owned = graph.owned()
    pipeline = pipeline_of(owned, owned.named_modules(), settings)
    assert pipeline is not None
    spread = Spread(captured.program, pipeline, batch_paths(call))
    groups = {pipeline.group: tuple(range(mesh.size))}
    count = mesh.size
    chosen = range(count) if count <= _MOST_PLANNED else (0, count // 2, count - 1)
    steps: dict[int, RankSteps] = {}
    plans: list[RankPlan] = []
    for rank in range(count):
        program = of_rank(spread, rank)
        check_awaited(program)
        events = steps_of(program, lambda _group: count).events
        steps[rank] = RankSteps(Steps(events, {}), groups)  # each has state of its own
        if rank in chosen:
            plans.append(rank_plan(rank, _plan_of(program, settings.plain()), steps[rank], mesh))
    return PlannedStages(tuple(plans), steps)


def _plan_of(program: Program, settings: Settings) -> Plan:
    """The plan by which it runs op by op, its updates in place."""
    plan = planned(Stage("capture", program, 0.0), settings)[1]
    return plan_to_run(LoweringRequest(plan, settings, frozenset(plan.in_place)))
