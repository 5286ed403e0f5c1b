"""plan(): the steps of some of many ranks, each in a child process, and held against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from monograph.capture.trace import TRACE_LOCK
from monograph.compat.distributed.groups import has_group
from monograph.distributed.planning.check import check_together
from monograph.distributed.planning.child import in_children
from monograph.distributed.planning.mesh import kinds_of_ranks, mesh_of
from monograph.distributed.planning.rank import plan_rank
from monograph.distributed.planning.report import RanksPlan
from monograph.errors import ConfigError, DistributedError, MonographError
from monograph.internals.internals import Internals
from monograph.settings import Settings, Zero


def plan_ranks(
    graph: Internals,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    world_size: int,
    mesh: Any = None,
    zero: int | None = None,
) -> RanksPlan:
    """What ranks would hold and send in a step with these arguments. Raises DistributedError; nothing here is changed."""
    try:
        if has_group():
            raise DistributedError(
                "plan() inside of a process group: it is for a process that belongs to none",
                hint="call it in a script of its own, without torchrun and init_process_group()",
            )
        grid = mesh_of(world_size, mesh)
        settings = _settings(graph.settings, zero)
        graph.check_usable()
        arguments = graph.formed(args, dict(kwargs))
        with graph.store.lock, TRACE_LOCK:  # a child has what no other thread is about to change
            (first,) = in_children([partial(plan_rank, graph, arguments, grid, 0, settings)])
            kinds = kinds_of_ranks(grid, first.rows)
            more = [partial(plan_rank, graph, arguments, grid, rank, settings) for rank in kinds if rank]
            found = [first, *in_children(more)]
    except MonographError as error:
        raise error.brief()  # noqa: B904  # it is the same error
    check_together({item.rank: item.steps for item in found})
    return RanksPlan(graph.name, grid, tuple(replace(item, like=kinds[item.rank]) for item in found))


def _settings(settings: Settings, stage: int | None) -> Settings:
    """Those of the graph, with another stage of ZeRO."""
    if stage is None:
        return settings
    if stage not in (1, 2, 3):
        raise ConfigError(f"plan(zero={stage!r}): there are stages 1, 2 and 3", hint="zero=3")
    known = settings.zero
    return replace(settings, zero=Zero(stage, 1024) if known is None else replace(known, stage=stage))
