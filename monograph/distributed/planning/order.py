"""Ranks that act a step out together: they agree on their collectives, messages are received, and none waits for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from monograph.distributed.agreement.ranks import first_difference
from monograph.distributed.planning.events import Begin, Event, Message, Post, Steps, Wait, Work
from monograph.errors import DistributedError
from monograph.ir.text import count_text

_HINT: Final = "every rank needs the same model, optimizer, settings and kind of batch"

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankSteps:
    """What a rank does in a step, and the ranks of its groups by their names."""

    steps: Steps
    groups: Mapping[str, Ranks]

    @property
    def events(self) -> tuple[Event, ...]:
        """In order."""
        return self.steps.events


def check_agreed(ranks: Mapping[int, RankSteps]) -> None:
    """Raise DistributedError if ranks of a group would run other collectives, begin them in another order, or read others.

    The same state is made of the same on all ranks that have it.
    """
    _check_collectives(ranks)
    made: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, steps in ranks.items():
        for path, content in steps.steps.renewed.items():
            made[path][rank] = content
    for path, found in made.items():
        if len(set(found.values())) > 1:
            numbers = [*found]
            deviating, *_ = first_difference([*found.values()])
            raise DistributedError(
                f"{_named([numbers[index] for index in deviating])} would make the new {path} of other values than the others",
                hint=_HINT,
            )


def _check_collectives(ranks: Mapping[int, RankSteps]) -> None:
    texts: dict[tuple[str, Ranks], dict[int, str]] = defaultdict(dict)
    for rank, steps in ranks.items():
        lines: dict[tuple[str, Ranks], list[str]] = {
            (name, found): [] for name, found in steps.groups.items()
        }
        for event in steps.events:
            if isinstance(event, Begin):
                group = event.transfer.group
                lines[group, _members(steps, group, rank)].append(f"{event.what}, made of {event.content}")
        for key, own in lines.items():
            texts[key][rank] = "\n".join(own)
    for (_, members), by_rank in texts.items():
        present = [rank for rank in members if rank in ranks]
        said = [by_rank.get(rank, "") for rank in present]
        if len(set(said)) > 1:
            deviating, line, here, there = first_difference(said)
            here, there = _told_apart(here, there)
            raise DistributedError(
                f"{_named([present[index] for index in deviating])} would run other collectives than the others: number {line} "
                f"of the group is {here}, and elsewhere {there}",
                hint=_HINT,
            )


def _told_apart(here: str, there: str) -> tuple[str, str]:
    """Two collectives in words; what they are made of only where nothing else differs."""
    short, other = (text.rpartition(", made of ")[0] or text for text in (here, there))
    return (short, other) if short != other else (f"{short} of other values", "not")


def _members(steps: RankSteps, group: str, rank: int) -> Ranks:
    members = steps.groups.get(group, ())
    if rank not in members:
        raise DistributedError(
            f"rank {rank} would run a collective in the group {group!r}, which it is not in"
        )
    return members


def _named(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks[:8]] + ["others"] * (len(ranks) > 8)
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True)
class RankTimes:
    """How long a rank takes for a step, and how long it computes meanwhile; in between it waits."""

    step_seconds: float
    work_seconds: float
    sent_seconds: float  # that what it begins and sends takes


@dataclass(eq=False)
class _Exchange:
    """A collective, or a message, that is done `seconds` after the last of `missing` has begun it."""

    seconds: float
    missing: set[int]
    begun: float = 0.0
    done: float | None = None


@dataclass(eq=False)
class _Rank:
    number: int
    steps: RankSteps
    place: int = 0
    now: float = 0.0
    worked: float = 0.0
    sent: float = 0.0
    open: dict[str, list[_Exchange]] = field(default_factory=dict)  # what it has begun and not yet waited for


def acted_out(
    ranks: Mapping[int, RankSteps],
    work_seconds: Callable[[Work], float] = lambda _work: 0.0,
    sending_seconds: Callable[[Ranks, int], float] = lambda _ranks, _nbytes: 0.0,
) -> Mapping[int, RankTimes]:
    """Let ranks run their steps. Raises DistributedError if some wait for each other, or for messages that nobody sends.

    A rank works while what it has begun is on its way; between the same ranks one thing is on its way at a time. Of a
    group those that are not among `ranks` are always ready.
    """
    return _Stage(ranks, work_seconds, sending_seconds).run()


class _Stage:
    def __init__(
        self,
        ranks: Mapping[int, RankSteps],
        work_seconds: Callable[[Work], float],
        sending_seconds: Callable[[Ranks, int], float],
    ) -> None:
        self._ranks = [_Rank(number, steps) for number, steps in ranks.items()]
        self._present = frozenset(ranks)
        self._work_seconds, self._sending_seconds = work_seconds, sending_seconds
        self._exchanges: dict[object, _Exchange] = {}
        self._counts: dict[object, int] = defaultdict(int)
        self._messages: dict[
            Ranks, tuple[bool, Message]
        ] = {}  # those of which one side is there, by ranks and number
        self._free: dict[object, float] = defaultdict(float)  # when what is between some ranks has arrived

    def run(self) -> Mapping[int, RankTimes]:
        waiting = list(self._ranks)
        while waiting:
            moved = [self._go_on(rank) for rank in waiting]
            waiting = [rank for rank in waiting if rank.place < len(rank.steps.events)]
            if waiting and not any(moved):
                self._raise_stuck(waiting)
        for (source, target, _), (is_sent, message) in self._messages.items():
            what = f"{message.form} with tag {message.tag}"
            if is_sent:
                raise DistributedError(
                    f"rank {source} sends {what} to rank {target}, which never receives it"
                )
            raise DistributedError(f"rank {target} receives {what} from rank {source}, which never sends it")
        return {rank.number: RankTimes(rank.now, rank.worked, rank.sent) for rank in self._ranks}

    def _go_on(self, rank: _Rank) -> bool:
        """Run a rank until it has to wait for others; True if it came further."""
        start = rank.place
        events = rank.steps.events
        while rank.place < len(events):
            event = events[rank.place]
            if isinstance(event, Wait):
                exchanges = rank.open[event.key]
                if any(item.done is None for item in exchanges):
                    break
                rank.now = max([rank.now, *(item.done or 0.0 for item in exchanges)])
            elif isinstance(event, Work):
                seconds = self._work_seconds(event)
                rank.now += seconds
                rank.worked += seconds
            elif isinstance(event, Begin):
                self._begin(rank, event)
            else:
                rank.open[event.key] = [*self._posted(rank, event)]
            rank.place += 1
        return rank.place > start

    def _begin(self, rank: _Rank, event: Begin) -> None:
        members = rank.steps.groups[event.transfer.group]
        number = self._counts[rank.number, members]
        self._counts[rank.number, members] += 1
        seconds = self._sending_seconds(members, event.transfer.payload_bytes)
        exchange = self._exchanges.get((members, number))
        if exchange is None:
            missing = set(members) & self._present
            exchange = self._exchanges[members, number] = _Exchange(seconds, missing)
        rank.open[event.key] = [exchange]
        self._arrive(rank, exchange, members)

    def _arrive(self, rank: _Rank, exchange: _Exchange, way: object) -> None:
        rank.sent += exchange.seconds
        exchange.missing.discard(rank.number)
        exchange.begun = max(exchange.begun, rank.now)
        if not exchange.missing:
            exchange.done = max(exchange.begun, self._free[way]) + exchange.seconds
            self._free[way] = exchange.done

    def _posted(self, rank: _Rank, event: Post) -> Iterator[_Exchange]:
        members = _members(rank.steps, event.group, rank.number)
        for is_sent, messages in ((True, event.sends), (False, event.receives)):
            for message in messages:
                yield self._posted_one(rank, members, message, is_sent=is_sent)

    def _posted_one(self, rank: _Rank, members: Ranks, message: Message, *, is_sent: bool) -> _Exchange:
        if not 0 <= message.peer < len(members) or members[message.peer] == rank.number:
            raise DistributedError(
                f"rank {rank.number} has a message for rank {message.peer} of a group of {len(members)}"
            )
        other = members[message.peer]
        source, target = (rank.number, other) if is_sent else (other, rank.number)
        number = self._counts[source, target, is_sent]
        self._counts[source, target, is_sent] += 1
        key = (source, target, number)
        exchange = self._exchanges.get(key)
        if exchange is None:
            seconds = self._sending_seconds((source, target), message.nbytes)
            exchange = self._exchanges[key] = _Exchange(seconds, {source, target})
            self._messages[key] = is_sent, message
        else:
            _, first = self._messages.pop(key)
            sent, received = (message, first) if is_sent else (first, message)
            if (sent.tag, sent.form) != (received.tag, received.form):
                raise DistributedError(
                    f"rank {source} sends {sent.form} with tag {sent.tag} to rank {target}, which receives {received.form} with "
                    f"tag {received.tag} there"
                )
        self._arrive(rank, exchange, (source, target))
        return exchange

    def _raise_stuck(self, waiting: Sequence[_Rank]) -> None:
        said = []
        for rank in waiting[:4]:
            event = rank.steps.events[rank.place]
            key = event.key if isinstance(event, Wait) else ""
            missing = sorted({other for item in rank.open.get(key, []) for other in item.missing})
            said.append(f"rank {rank.number} at {key.rpartition('/')[2]} for {_named(missing)}")
        more = len(waiting) - len(said)
        rest = f", and {count_text(more, 'more rank')}" if more else ""
        raise DistributedError(f"ranks wait for each other: {'; '.join(said)}{rest}", hint=_HINT)
