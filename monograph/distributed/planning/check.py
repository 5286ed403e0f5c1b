"""The programs of all ranks of a step, held against each other: what would hang, or give wrong numbers without an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from monograph.distributed.planning.events import steps_of
from monograph.distributed.planning.order import Ranks, RankSteps, acted_out, check_agreed
from monograph.distributed.planning.partial import check_awaited, check_whole
from monograph.errors import DistributedError
from monograph.ir.program import Program


@dataclass(frozen=True)
class RankProgram:
    """The program of a rank, and the ranks of its groups by their names.

    `parts` has by path the state of which ranks of a group hold parts. `shares` is False where ranks have the same batch, as in
    a pipeline.
    """

    program: Program
    groups: Mapping[str, Ranks]
    parts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    shares: bool = True


def check_ranks(ranks: Mapping[int, RankProgram]) -> None:
    """Raise DistributedError that names ranks and ops if a step by these programs would hang, or compute something else.

    In each group all ranks run the same collectives in one order, what is sent is received, nothing is read before it is
    done, and new state comes of all batches and all parts.
    """
    steps: dict[int, RankSteps] = {}
    for rank, item in ranks.items():
        try:
            check_awaited(item.program)
            if item.shares:
                check_whole(item.program, item.parts, partial(_covers, ranks, rank))
        except DistributedError as error:
            message = f"rank {rank}: {error.message}"
            raise DistributedError(message, where=error.where, hint=error.hint) from error
        sizes = {name: len(members) for name, members in item.groups.items()}
        between = () if item.shares else tuple(item.groups)
        steps[rank] = RankSteps(steps_of(item.program, partial(_size_of, sizes), between), item.groups)
    check_together(steps)


def check_together(steps: Mapping[int, RankSteps]) -> None:
    """Raise DistributedError if ranks that run these steps would not agree, or wait for each other for ever."""
    check_agreed(steps)
    acted_out(steps)


def _size_of(sizes: Mapping[str, int], name: str) -> int:
    return sizes.get(name, 1)


def _covers(ranks: Mapping[int, RankProgram], rank: int, joined: frozenset[str]) -> bool:
    """True if values that are put together over these groups come of all ranks."""
    found, pending = {rank}, [rank]
    while pending:
        groups = ranks[pending.pop()].groups
        new = {other for name in joined for other in groups.get(name, ())} - found
        found |= new
        pending += new
    return found >= ranks.keys()
