"""Single steps towards less memory: a unit that is dropped, with those that have to run again for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from monograph.recompute.problem import Numbers, Problem
from monograph.recompute.schedule import Schedule

MOVES_OF_A_UNIT: Final = 3  # at most
_BUCKETS: Final = 1024  # of the time axis
_SMALL: Final = 8  # what is this many times smaller than what is freed for it may be held instead


@dataclass(frozen=True, slots=True)
class Move:
    """Units to drop together: by prediction `gain` bytes less above the target, summed over time, for `seconds`."""

    units: tuple[int, ...]
    gain: float
    seconds: float
    spans: tuple[tuple[int, int, int], ...]  # first and last bucket, and the bytes that are freed there

    @property
    def worth(self) -> float:
        """The gain for a second."""
        return self.gain / (self.seconds + 1e-9)


class Excess:
    """The bytes above a target over time, in buckets each of which has the most of its ops."""

    def __init__(self, held: Numbers, target: int) -> None:
        self._width = -(-len(held) // _BUCKETS)
        padded = np.zeros(-(-len(held) // self._width) * self._width, np.int64)
        padded[: len(held)] = held
        self.left = np.maximum(padded.reshape(-1, self._width).max(1) - target, 0)

    def buckets(self, first: int, last: int) -> tuple[int, int]:
        """The buckets that are whole within a span of the order."""
        return -(-first // self._width), (last + 1) // self._width

    def covered(self, first: int, last: int, nbytes: int) -> int:
        """How much of it so many bytes are, in these buckets."""
        return int(np.minimum(self.left[first:last], nbytes).sum())

    def take(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Count bytes as freed."""
        for first, last, nbytes in spans:
            part = self.left[first:last]
            np.maximum(part - nbytes, 0, out=part)


def moves(
    problem: Problem,
    seconds: Sequence[float],
    now: Schedule,
    excess: Excess,
    left_out: Collection[tuple[int, ...]],
) -> list[Move]:
    """Every move from a schedule that frees something above the target, the best one first."""
    found: dict[tuple[int, ...], Move] = {}
    maker = _Moves(problem, seconds, now, excess)
    for index in problem.useful:
        if index not in now.dropped and now.wanted[index] <= problem.steps:
            for move in maker.of(index):
                if move.gain > 0 and move.units not in left_out:
                    found[move.units] = move
    return sorted(found.values(), key=lambda move: (-move.worth, move.units))


class _Moves:
    def __init__(self, problem: Problem, seconds: Sequence[float], now: Schedule, excess: Excess) -> None:
        self._problem, self._seconds, self._now, self._excess = problem, seconds, now, excess
        self._again = {index for _, index in now.again}

    def of(self, index: int) -> Iterator[Move]:
        """The unit with all that has to run again for it, and with what is large of that: the rest is held."""
        freed = sum(int(self._problem.nbytes[item]) for item in self._problem.units[index].dropped)
        yield self._move(index, 0)
        yield self._move(index, freed // _SMALL)
        yield self._move(index, freed)

    def _move(self, index: int, small: int) -> Move:
        """`small` is how large a value may be that is held up to where the unit runs again."""
        problem, now = self._problem, self._now
        place = now.wanted[index]
        units, pending, held = {index}, [index], dict[int, int]()
        while pending:
            for item in problem.units[pending.pop()].reads:
                other = problem.unit_of[item]
                if other in units or other in now.dropped:
                    continue
                if now.ends[item] >= place + now.shift[place] or not problem.nbytes[item]:
                    continue
                if other >= 0 and problem.nbytes[item] > small:
                    units.add(other)
                    pending.append(other)
                else:
                    held[item] = place
        spans = [span for unit in sorted(units) for span in self._freed(unit, place)]
        gain = float(sum(self._excess.covered(*span) for span in spans))
        for item, until in held.items():
            first, last = self._excess.buckets(int(now.ends[item]) + 1, int(until + now.shift[until]))
            gain -= float((self._excess.left[first:last] > 0).sum() * problem.nbytes[item])
        more = [unit for unit in units | self._dropped_for(units) if unit not in self._again]
        cost = sum(self._seconds[unit] for unit in more)
        return Move(tuple(sorted(units)), gain, cost, tuple(spans))

    def _dropped_for(self, units: Collection[int]) -> set[int]:
        """Units that were dropped in vain so far, and will have to run again."""
        problem, found, pending = self._problem, set[int](), list(units)
        while pending:
            for item in problem.units[pending.pop()].reads:
                other = problem.unit_of[item]
                if other in self._now.dropped and other not in self._again and other not in found:
                    found.add(other)
                    pending.append(other)
        return found

    def _freed(self, index: int, place: int) -> Iterator[tuple[int, int, int]]:
        """When the storages of a unit would not be held any more."""
        problem, now = self._problem, self._now
        end = min(place, now.wanted[index])
        for item in problem.units[index].dropped:
            read = max(
                (p for p, _ in problem.readers[item] if p < end), default=problem.units[index].position
            )
            first = read + int(now.shift[read]) + 1
            last = min(int(now.ends[item]), end + int(now.shift[end]) - 1)
            if last >= first and problem.nbytes[item]:
                yield *self._excess.buckets(first, last), int(problem.nbytes[item])
