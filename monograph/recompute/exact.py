"""The best choice by trying all of them: for few units, and the yardstick of the search for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import Final

from monograph.recompute.schedule import Schedule, Scheduler

FEW: Final = 10  # units, up to which every choice is looked at


def all_schedules(scheduler: Scheduler, units: Sequence[int], base: frozenset[int]) -> Iterator[Schedule]:
    """Every choice among these units; the others of `base` are dropped in each."""
    choices = chain.from_iterable(combinations(units, count) for count in range(len(units) + 1))
    return (scheduler.schedule(base.union(choice)) for choice in choices)


def best_within(scheduler: Scheduler, units: Sequence[int], budget: int) -> Schedule | None:
    """The fastest of all choices among these units whose peak is within a budget; None if there is none.

    Goes through the units from the last one back, as what needs a unit again is known then. A branch ends where the
    units decided so far take as long as what was found.
    """
    best: Schedule | None = None
    order = sorted(units, reverse=True)
    pending: list[tuple[int, frozenset[int]]] = [(0, frozenset())]
    while pending:
        count, chosen = pending.pop()
        now = scheduler.schedule(chosen)
        if best is not None and now.seconds >= best.seconds and now.seconds > 0:
            continue
        if now.peak <= budget and (best is None or now.seconds < best.seconds):
            best = now
        if count == len(order):
            continue
        unit = order[count]
        pending.append((count + 1, chosen))
        if now.wanted[unit] <= scheduler.problem.steps:
            pending.append((count + 1, chosen | {unit}))
    return best
