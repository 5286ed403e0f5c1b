"""The curve of a problem: for each peak of memory the fastest schedule that was found. Budgets choose from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from monograph.recompute.exact import FEW, all_schedules
from monograph.recompute.moves import MOVES_OF_A_UNIT, Excess, Move, moves
from monograph.recompute.problem import Problem
from monograph.recompute.schedule import Schedule, Scheduler
from monograph.recompute.segments import segmented

_LEVELS: Final = 64  # at least; the target goes down by such a share of the whole
_FINEST: Final = 4_000
_TRIES: Final = 4_000  # of exchanges, in units of what they go through
_FIRST_STEPS: Final = (8, 16)  # of the whole, of a search that is to be quick
_LAST_STEP: Final = 128
_TOGETHER: Final = 12  # moves that are made at once
_PUT_BACK: Final = 200  # units that are looked at, at most, whether they need not be dropped
_FAILURES: Final = 40  # moves that are tried in vain before a target is given up
# that a quick search looks at: two seconds; the models of the benchmarks need 6,000
_MOST_MOVES: Final = 100_000
_BYTES_FOR_A_MOVE: Final = 64  # of a peak: a small one is not worth a long search


@dataclass(frozen=True)
class Curve:
    """Schedules in the order of their peaks, the largest and fastest first: each one is slower than those before it."""

    schedules: tuple[Schedule, ...]

    @property
    def least(self) -> int:
        """The fewest bytes that any of them holds at its peak."""
        return self.schedules[-1].peak

    def within(self, budget: int) -> Schedule | None:
        """The fastest one whose peak is within a budget of bytes."""
        return next((item for item in self.schedules if item.peak <= budget), None)

    def free(self, most_seconds: float) -> Schedule:
        """The one of the least peak that takes at most so much more time."""
        return [
            item for item in self.schedules if item.seconds <= max(most_seconds, self.schedules[0].seconds)
        ][-1]


def curve_of(problem: Problem, seconds: Sequence[float], fixed: Iterable[int] = ()) -> Curve:
    """The curve. The units `fixed` are dropped in all of its schedules."""
    scheduler, base = Scheduler(problem, seconds), frozenset(fixed)
    left = [index for index in problem.useful if index not in base]
    if len(left) <= FEW:
        return _curve(all_schedules(scheduler, left, base))
    return searched(scheduler, base)


def least_within(
    problem: Problem, seconds: Sequence[float], most_seconds: float, fixed: Iterable[int] = ()
) -> Schedule:
    """A schedule of a small peak that takes at most so much more time than with the units `fixed`, found in few steps."""
    search = _Search(Scheduler(problem, seconds), frozenset(fixed))
    start = search.scheduler.schedule(search.base)
    ways = [search.quickly(start, most_seconds, start.peak // share) for share in _FIRST_STEPS]
    return min(ways, key=lambda way: (way.peak, way.seconds))


def searched(scheduler: Scheduler, base: frozenset[int] = frozenset()) -> Curve:
    """The curve as it is found for many units. Those of `base` are dropped in all of its schedules."""
    return _curve(_Search(scheduler, base).schedules())


def _curve(found: Iterable[Schedule]) -> Curve:
    best: list[Schedule] = []
    for item in sorted(
        found, key=lambda item: (item.seconds, item.peak, len(item.dropped), sorted(item.dropped))
    ):
        if not best or item.peak < best[-1].peak:
            best.append(item)
    return Curve(tuple(best))


class _Search:
    """Goes down from target to target: drops what frees most for its time, and puts back what was not needed."""

    def __init__(self, scheduler: Scheduler, base: frozenset[int]) -> None:
        self.scheduler, self.base = scheduler, base
        self.problem, self.seconds = scheduler.problem, scheduler.seconds
        self._by_cost = sorted(
            self.problem.useful, key=lambda index: (-self.seconds[index], self.problem.units[index].position)
        )
        self._tries = _TRIES
        self._moves_left = math.inf

    def schedules(self) -> Iterator[Schedule]:
        """All that are worth a look."""
        start = now = self.scheduler.schedule(self.base)
        yield now
        segments = [self.scheduler.schedule(item | self.base) for item in segmented(self.problem)]
        yield from segments
        levels = max(_LEVELS, _FINEST // max(len(self.problem.useful), 1))
        step, least = now.peak // levels + 1, now.peak // _FINEST
        while step > least:
            target = now.peak - step
            found = [self._down(now, target), *_fastest(item for item in segments if item.peak <= target)]
            if self._tries > 0:
                found.append(self._down(start, target))
            ways = {self._put_back(item, target) for item in found if item is not None}
            if ways:
                now = self._exchanged(min(ways, key=_order), target)
                yield now
                continue
            step //= 2
            if step <= least and (other := self._elsewhere(now)) is not None:
                now, step = other, now.peak // levels + 1
                yield now

    def quickly(self, start: Schedule, most_seconds: float, step: int) -> Schedule:
        """What is found in large steps, and then in smaller ones, for at most so much more time than a start."""
        now, least = start, max(1, start.peak // _LAST_STEP)
        self._moves_left = min(_MOST_MOVES, start.peak // _BYTES_FOR_A_MOVE)
        while step >= least:
            found = self._down(now, now.peak - step)
            if found is None or found.seconds - start.seconds > most_seconds:
                step //= 2
            else:
                now = found
        return self._put_back(now, now.peak)

    def _down(self, now: Schedule, target: int, without: int = -1) -> Schedule | None:
        """Drop more until the peak is within the target, or less where that helps; None if nothing does in time."""
        failed: set[tuple[int, ...]] = set()
        while now.peak > target:
            if self._moves_left <= 0:
                return None
            self._moves_left -= len(self.problem.useful) * MOVES_OF_A_UNIT
            excess, above = Excess(now.held, target), _above(now, target)
            ranked = moves(self.problem, self.seconds, now, excess, failed) if len(failed) < _FAILURES else ()
            batch = _batch((move for move in ranked if without not in move.units), excess)
            better = next(self._better(now, batch, target, above), None)
            if better is not None:
                now = better
            elif batch:
                failed.add(batch[0].units)
            elif (better := next(self._with_less(now, target, above), None)) is not None:
                now = better
            else:
                return None
        return now

    def _better(self, now: Schedule, batch: Sequence[Move], target: int, above: int) -> Iterator[Schedule]:
        """With all of these moves, or with the best of them."""
        count = len(batch)
        while count:
            found = self.scheduler.schedule(now.dropped.union(*(move.units for move in batch[:count])))
            if _above(found, target) < above:
                yield found
            count //= 2

    def _with_less(self, now: Schedule, target: int, above: int) -> Iterator[Schedule]:
        """With a unit that is held: what would run again for it, early in backward, holds more."""
        most = max(range(len(now.held)), key=now.held.__getitem__)
        inside = [index for rank, (place, index) in enumerate(now.again) if place + rank <= most]
        for index in inside[-_FAILURES:]:
            if index not in self.base:
                found = self.scheduler.schedule(now.dropped - {index})
                if _above(found, target) < above:
                    yield found

    def _exchanged(self, now: Schedule, target: int) -> Schedule:
        """Hold a unit and find others to drop for it, where that is faster."""
        for index in self._by_cost:
            if self._tries <= 0:
                break
            if index in now.dropped and index not in self.base:
                self._tries -= len(now.again)
                found = self._down(self.scheduler.schedule(now.dropped - {index}), target, index)
                if found is not None and _order(found := self._put_back(found, target)) < _order(now):
                    now = found
        return now

    def _elsewhere(self, now: Schedule) -> Schedule | None:
        """Hold a unit or two, and find others to drop for them, that lead to less."""
        dropped = [index for index in self._by_cost if index in now.dropped and index not in self.base]
        for held in (*((index,) for index in dropped), *combinations(dropped, 2)):
            if self._tries <= 0:
                break
            self._tries -= len(now.again)
            start = self.scheduler.schedule(now.dropped.difference(held))
            if (found := self._down(start, now.peak - 1, held[0])) is not None:
                return found
        return None

    def _put_back(self, now: Schedule, target: int) -> Schedule:
        """Keep what need not be dropped for this target, the most expensive first."""
        if len(now.again) < len(now.dropped):  # what is dropped in vain
            now = self.scheduler.schedule(self.base.union(index for _, index in now.again))
        left = _PUT_BACK
        for index in self._by_cost:
            if index not in now.dropped or index in self.base or not self._has_room(now, index, target):
                continue
            if not left:
                break
            left -= 1
            other = self.scheduler.schedule(now.dropped - {index})
            if other.peak <= target and other.seconds <= now.seconds:
                now = other
        return now

    def _has_room(self, now: Schedule, index: int, target: int) -> bool:
        """False if a unit cannot be held where it is not now."""
        place = now.wanted[index]
        if place > self.problem.steps:
            return True
        until = place + int(now.shift[place])
        for item in self.problem.units[index].dropped:
            between = now.held[int(now.ends[item]) + 1 : until - len(now.again)]
            if between.max(initial=0) + self.problem.nbytes[item] > target:
                return False
        return True


def _batch(ranked: Iterable[Move], excess: Excess) -> list[Move]:
    """The best moves that do not free the same bytes, as many as seem to be needed."""
    found: list[Move] = []
    for move in ranked:
        if sum(excess.covered(*span) for span in move.spans) * 2 > move.gain:
            found.append(move)
            excess.take(move.spans)
        if len(found) == _TOGETHER or not excess.left.any():
            break
    return found


def _above(now: Schedule, target: int) -> int:
    return int(np.maximum(now.held - target, 0).sum())


def _fastest(found: Iterable[Schedule]) -> list[Schedule]:
    return sorted(found, key=_order)[:1]


def _order(now: Schedule) -> tuple[float, int]:
    return now.seconds, now.peak
