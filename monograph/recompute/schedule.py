"""When dropped values are computed again, and the bytes that are held at each op then."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from monograph.recompute.problem import Numbers, Problem


@dataclass(frozen=True, eq=False)
class Schedule:
    """What follows from a choice of units to drop.

    `again` has the places at which units run again, and the units: each right before the op at its place, those of one
    place in the program's order. `vanished` are units that do not run in forward any more. `seconds` are predicted to come
    on top of the step. `held` are the bytes at each op of the new order, in which the op at a position comes later by
    `shift`, and what forward makes is held from `births` to `ends`. `wanted` has for each unit the position at which it
    would run again.
    """

    dropped: frozenset[int]
    again: tuple[tuple[int, int], ...]
    vanished: frozenset[int]
    seconds: float
    held: Numbers
    shift: Numbers
    births: Numbers
    ends: Numbers
    wanted: tuple[int, ...]
    peak: int


class _Spans(NamedTuple):
    """When storages are held, and their bytes."""

    births: Numbers
    ends: Numbers
    nbytes: Numbers

    def and_also(self, others: _Spans) -> _Spans:
        """Those of both."""
        return _Spans(*(np.concatenate(pair) for pair in zip(self, others, strict=True)))


class Scheduler:
    """Makes the schedules of a problem. `seconds` are the predicted times of its units."""

    def __init__(self, problem: Problem, seconds: Sequence[float]) -> None:
        self.problem, self.seconds = problem, tuple(seconds)
        self._inside = list(problem.inside), list(problem.inside.values())
        self._over = np.array(problem.over, np.int64).reshape(-1, 2).T
        self._over_at: dict[int, list[int]] = {}  # by the position of an op
        for position, item in problem.over:
            self._over_at.setdefault(position, []).append(item)

    def schedule(self, dropped: Collection[int]) -> Schedule:
        """The schedule if these units are dropped. One that nothing needs again is dropped in vain, and runs once."""
        problem, chosen = self.problem, frozenset(dropped)
        decided = _Decided(problem, self.seconds, chosen)
        again = sorted(decided.again)
        places = np.array([place for place, _ in again], np.int64)
        shift = np.cumsum(np.bincount(places, minlength=problem.steps + 1))
        births, ends = problem.births + shift[problem.births], problem.ends.copy()
        ends[list(decided.ends)] = list(decided.ends.values())
        ends += shift[ends]
        nbytes = problem.nbytes
        if decided.vanished:
            nbytes = nbytes.copy()
            nbytes[[item for index in decided.vanished for item in problem.units[index].own]] = 0
        copies = self._copies(again, shift, ends)
        spans = _Spans(births, ends, nbytes).and_also(copies)
        held = self._held(spans, shift, births, ends, len(again))
        return Schedule(
            chosen,
            tuple(again),
            frozenset(decided.vanished),
            decided.seconds,
            held,
            shift,
            births,
            ends,
            tuple(decided.wanted),
            int(held.max(initial=0)),
        )

    def _copies(self, again: Sequence[tuple[int, int]], shift: Numbers, ends: Numbers) -> _Spans:
        """Births, ends and bytes of what is made again; what that reads of other values is held until then, in `ends`.

        There a value also ends whose memory an op takes over.
        """
        problem = self.problem
        made: dict[int, list[int]] = {}
        briefly: list[tuple[int, int]] = []  # what also leaves the program: it is there already
        for rank, (place, index) in enumerate(again):
            unit, now = problem.units[index], place + rank
            for item in (problem.read_at(read, place) for read in unit.reads):
                if item in made:
                    made[item][1] = max(made[item][1], now)
                elif ends[item] < now:
                    ends[item] = now
            for item in unit.own:
                if problem.unit_of[item] == index:
                    read = problem.ends[item]
                    made[item] = [now, int(read + shift[read]) if read >= place else now]
                else:
                    briefly.append((now, item))
        self._write_over(again, shift, ends, made)
        spans = [(birth, end, problem.nbytes[item]) for item, (birth, end) in made.items()]
        spans += [(now, now, problem.nbytes[item]) for now, item in briefly]
        found = np.array(spans, np.int64).reshape(-1, 3)
        return _Spans(found[:, 0], found[:, 1], found[:, 2])

    def _write_over(
        self, again: Sequence[tuple[int, int]], shift: Numbers, ends: Numbers, made: dict[int, list[int]]
    ) -> None:
        """An op takes the memory of one of the values that it reads last, which ends right before it: in `ends` or `made`."""
        positions, items = self._over
        now = positions + shift[positions]
        is_last = ends[items] == now
        if made:
            copied = np.full(len(ends), -1, np.int64)
            copied[list(made)] = [end for _, end in made.values()]
            is_last |= copied[items] == now
        last = np.flatnonzero(is_last)
        _, first = np.unique(now[last], return_index=True)
        taken = list(zip(now[last[first]].tolist(), items[last[first]].tolist(), strict=True))
        for rank, (place, index) in enumerate(again):
            position = self.problem.units[index].position
            for item in self._over_at.get(position, ()):
                if place + rank in (ends[item], made[item][1] if item in made else -1):
                    taken.append((place + rank, item))
                    break
        for end, item in taken:
            if item in made and made[item][1] == end:
                made[item][1] -= 1
            else:
                ends[item] -= 1

    def _held(self, spans: _Spans, shift: Numbers, first: Numbers, last: Numbers, count: int) -> Numbers:
        """The bytes at each op, from the spans in which storages are held."""
        problem = self.problem
        size = problem.steps + 1 + count
        waiting = [item for item in problem.renewed if last[item.old] > first[item.new]]
        if waiting:  # new state whose memory others still read
            made, old = [item.new for item in waiting], [item.old for item in waiting]
            nbytes = np.array([problem.renewed_nbytes[item] for item in made], np.int64)
            spans = spans.and_also(_Spans(first[made], last[old], nbytes))
        change = np.bincount(spans.births, spans.nbytes, size + 1)
        change -= np.bincount(spans.ends + 1, spans.nbytes, size + 1)
        held = np.cumsum(change)[:size]
        if problem.inside:
            positions = np.array(self._inside[0])
            held[positions + shift[positions]] += self._inside[1]
        return held.astype(np.int64)


class _Decided:
    """Goes through the units from the last one back: what needs a unit again is known when it comes to it."""

    def __init__(self, problem: Problem, seconds: Sequence[float], chosen: frozenset[int]) -> None:
        self.wanted = [unit.late for unit in problem.units]
        self.again: list[tuple[int, int]] = []
        self.vanished: set[int] = set()
        self.ends: dict[int, int] = {}  # of what forward makes, where that is no longer held for backward
        self.seconds = 0.0
        wanted, vanished, unit_of = self.wanted, self.vanished, problem.unit_of
        for index in sorted(chosen, reverse=True):
            place, unit = wanted[index], problem.units[index]
            if place > problem.steps:
                continue
            self.again.append((place, index))
            self.seconds += seconds[index]
            for item in unit.reads:
                other = unit_of[problem.read_at(item, place)]
                if other >= 0 and wanted[other] > place:
                    wanted[other] = place
            used = unit.stays or len(unit.own) > len(unit.dropped)
            for item in unit.dropped:
                end = unit.position
                for position, reader in problem.readers[item]:
                    if position >= place:
                        break
                    if reader not in vanished:
                        end, used = position, True
                self.ends[item] = end
            if not used:
                vanished.add(index)
                self.seconds -= seconds[index]
