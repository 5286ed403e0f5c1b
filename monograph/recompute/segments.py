"""Whole stretches of forward that are dropped, but for what crosses from one to the next: checkpoints by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from monograph.recompute.problem import Problem

_COUNTS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)


def segmented(problem: Problem) -> Iterator[frozenset[int]]:
    """Units to drop, for growing numbers of segments of about the same bytes, cut where little crosses."""
    units = [problem.units[index] for index in problem.useful]
    if not units:
        return
    reach = _last_reads(problem)
    saved = np.cumsum([sum(int(problem.nbytes[item]) for item in unit.dropped) for unit in units])
    crossing = _crossing(problem, reach)
    seen: set[frozenset[int]] = set()
    for count in _COUNTS:
        if count > len(units):
            return
        cuts = [
            _narrowest(problem, saved, crossing, part / count, 1 / (3 * count)) for part in range(1, count)
        ]
        found = frozenset(
            index
            for index in problem.useful
            if not any(problem.units[index].position < cut <= reach[index] for cut in cuts)
        )
        if found not in seen:
            seen.add(found)
            yield found


def _last_reads(problem: Problem) -> dict[int, int]:
    """For each unit the last position at which forward reads it."""
    found = {}
    for index in problem.useful:
        unit = problem.units[index]
        read = [p for item in unit.dropped for p, _ in problem.readers[item] if p < unit.late]
        found[index] = max(read, default=unit.position)
    return found


def _crossing(problem: Problem, reach: dict[int, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The bytes that forward reads on both sides of each position."""
    change = np.zeros(problem.steps + 2, np.int64)
    for index in problem.useful:
        unit = problem.units[index]
        nbytes = sum(int(problem.nbytes[item]) for item in unit.dropped)
        change[unit.position + 1] += nbytes
        change[reach[index] + 1] -= nbytes
    return np.cumsum(change)


def _narrowest(
    problem: Problem,
    saved: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]],
    crossing: np.ndarray[tuple[int], np.dtype[np.int64]],
    share: float,
    around: float,
) -> int:
    """The position near this share of all bytes at which least crosses."""
    whole = saved[-1]
    first, last = (
        int(np.searchsorted(saved, whole * min(max(share + side, 0.0), 1.0))) for side in (-around, around)
    )
    last = min(last, len(problem.useful) - 1)
    positions = [problem.units[problem.useful[index]].position + 1 for index in range(first, last + 1)]
    return min(positions, key=lambda position: (int(crossing[position]), position))
