"""plan(): the steps of some of many ranks, each in a child process, and held against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from monograph.capture.trace import TRACE_LOCK
from monograph.compat.distributed.groups import has_group
from monograph.compat.distributed.pipelining import SCHEDULES
from monograph.distributed.planning.check import check_together
from monograph.distributed.planning.child import in_children
from monograph.distributed.planning.mesh import Mesh, kinds_of_ranks, mesh_of
from monograph.distributed.planning.order import RankSteps
from monograph.distributed.planning.rank import RankPlan, plan_rank
from monograph.distributed.planning.report import RanksPlan
from monograph.distributed.planning.stages import kinds_of_copies, plan_stages
from monograph.errors import ConfigError, DistributedError, MonographError
from monograph.internals.internals import Arguments, Internals
from monograph.settings import Settings, Zero


def plan_ranks(
    graph: Internals,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    world_size: int,
    mesh: Any = None,
    zero: int | None = None,
    pipeline: str | None = None,
) -> RanksPlan:
    """What ranks would hold and send in a step with these arguments. Raises DistributedError; nothing here is changed."""
    try:
        if has_group():
            raise DistributedError(
                "plan() inside of a process group: it is for a process that belongs to none",
                hint="call it in a script of its own, without torchrun and init_process_group()",
            )
        settings = _settings(graph.settings, zero, pipeline)
        grid = mesh_of(world_size, mesh, "pipeline" if settings.stages else "data")
        graph.check_usable()
        arguments = graph.formed(args, dict(kwargs))
        with graph.store.lock, TRACE_LOCK:  # a child has what no other thread is about to change
            if settings.stages:
                plans, steps = _in_stages(graph, arguments, grid, settings)
            else:
                plans, steps = _data_parallel(graph, arguments, grid, settings)
        check_together(steps)
    except MonographError as error:
        raise error.brief()
    return RanksPlan(graph.name, grid, plans, steps)


def _in_stages(
    graph: Internals, arguments: Arguments, mesh: Mesh, settings: Settings
) -> tuple[tuple[RankPlan, ...], Mapping[int, RankSteps]]:
    kinds = kinds_of_copies(mesh, settings)
    found = in_children([partial(plan_stages, graph, arguments, mesh, settings, copy) for copy in kinds])
    copies = zip(kinds.values(), found, strict=True)
    plans = tuple(replace(plan, like=like) for like, item in copies for plan in item.plans)
    return plans, {rank: steps for item in found for rank, steps in item.steps.items()}


def _data_parallel(
    graph: Internals, arguments: Arguments, mesh: Mesh, settings: Settings
) -> tuple[tuple[RankPlan, ...], Mapping[int, RankSteps]]:
    (first,) = in_children([partial(plan_rank, graph, arguments, mesh, 0, settings)])
    kinds = kinds_of_ranks(mesh, first.rows)
    more = [partial(plan_rank, graph, arguments, mesh, rank, settings) for rank in kinds if rank]
    found = [first, *in_children(more)]
    plans = tuple(replace(item.plan, like=kinds[item.plan.rank]) for item in found)
    return plans, {item.plan.rank: item.steps for item in found}


def _settings(settings: Settings, stage: int | None, schedule: str | None) -> Settings:
    """Those of the graph, with another stage of ZeRO, or another schedule of its pipeline."""
    if stage is not None:
        if stage not in (1, 2, 3):
            raise ConfigError(
                f"plan(zero={stage!r}): there are stages 1, 2 and 3",
                hint="zero=3; plain data parallel is planned without `zero`, by a graph without enable_zero()",
            )
        known = settings.zero
        settings = replace(settings, zero=Zero(stage, 1024) if known is None else replace(known, stage=stage))
    if schedule is None:
        return settings
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"plan(pipeline={schedule!r}): there is no such schedule", hint=f"one of {', '.join(SCHEDULES)}"
        )
    if not settings.stages:
        raise DistributedError(
            f"plan(pipeline={schedule!r}) of a graph whose modules have no stages",
            hint="set the stage of each module: block.to(mg.GraphModule).set_stage(0)",
        )
    return replace(settings, pipeline_schedule=schedule)
