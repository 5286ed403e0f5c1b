"""The ranks of a process group, which leave each other words in its store: no tensors, no collectives."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, Protocol, TypeVar

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from monograph.compat.distributed.groups import store_of
from monograph.errors import DistributedError

_FIRST_PAUSE: Final = (
    0.0002  # seconds between two looks at the store; it grows, since who waits long waits for much
)
_LONGEST_PAUSE: Final = 0.02
_PATIENCE: Final = 10.0  # seconds
_ANSWER_SECONDS: Final = 1.8  # that a store may take which is not known to be there still

RESTART: Final = (
    "this graph cannot go on: end all ranks and start them again from the newest checkpoint, as "
    "torchrun --max-restarts does"
)
WAITED: Final = (
    "if it has fewer batches than the others, DistributedSampler and DataLoader(..., drop_last=True) give all as many; else "
    + RESTART
)
ALIKE: Final = (
    "every rank needs the same model, optimizer, settings and kind of batch, in a pipeline batches of one size; "
    + RESTART
)

T = TypeVar("T")
_LOGGER: Final = logging.getLogger("monograph")


class Watcher(Protocol):
    """Who knows what the other ranks do."""

    def look(self) -> DistributedError | None:
        """Raises DistributedError if waiting for them is in vain; one that it gives is to be raised unless they have met."""

    def last(self, ranks: Sequence[int]) -> str:
        """What they did last."""


@dataclass(frozen=True)
class _Roster:
    """Who has come to a meeting, and what each of them says; None for who has not."""

    hellos: tuple[str | None, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.hellos).encode()).hexdigest()[:16]


class Ranks:
    """The ranks of a group, by their numbers in it; `names` are those of the whole job.

    Every rank makes one, and meets the others. `seconds` is how long they wait for each other, by default what the
    store of the group waits, which is the timeout of a group that torchrun's environment made. After `patience` a rank
    that waits says so.

    The store may hold what ranks of an earlier run left, which torchrun ended: it may keep the store when it starts
    them again. So each meeting is one of ranks that have answered each other, and `store` is for those of the first.
    """

    def __init__(
        self,
        name: str,
        group: distributed.ProcessGroup | None = None,
        *,
        seconds: float | None = None,
        patience: float = _PATIENCE,
    ) -> None:
        group = group or distributed.group.WORLD
        if group is None:
            raise DistributedError(
                "there is no process group", hint="call torch.distributed.init_process_group() first"
            )
        self.rank, self.size = group.rank(), group.size()
        self.names: Sequence[int] = distributed.get_process_group_ranks(group)
        # the connection of the group: a server of torch that gets a new one may look up its name, for seconds
        store: Any = store_of(group)
        self.patience = patience
        self.seconds = store.timeout.total_seconds() if seconds is None else seconds
        self._hall: Any = PrefixStore(f"monograph/{name}", store)
        self.store: Any = None  # once they have met

    def key(self, what: str, rank: int | None = None) -> str:
        """Where a rank, by default this one, leaves a word."""
        return f"{what}/{self.rank if rank is None else rank}"

    def read(self, key: str) -> str | None:
        """A word, if it is there."""
        return _words(self.store, [key])[0]

    def read_all(self, what: str) -> list[str | None]:
        """The word of each rank, if it is there."""
        return _words(self.store, [self.key(what, rank) for rank in range(self.size)])

    def meet(self, word: str, purpose: str, watcher: Watcher | None = None) -> list[str]:
        """Wait until every rank has come here, with a word; all words, on all ranks.

        `purpose` says what it is for, in errors and in the warning of a rank that waits long. Raises DistributedError that names
        who has not come in time.
        """
        hello = json.dumps([secrets.token_hex(8), word])
        self._hall.set(self.key("hello"), hello)
        begin, pause, is_patient = time.monotonic(), _FIRST_PAUSE, True
        turn = self._lead if self.rank == 0 else self._follow
        roster = _Roster((None,) * self.size)
        while True:
            roster, is_complete = turn(roster, hello)
            if is_complete:
                break
            waited = time.monotonic() - begin
            if waited > self.seconds:
                raise self._too_late(roster, purpose, watcher)
            if waited > self.patience and is_patient:
                is_patient = False
                _LOGGER.warning(
                    "%s has waited %.0f seconds %s: %s did not come so far, which is an error after %g seconds; every rank has to "
                    "do this",
                    *(
                        self.named([self.rank]),
                        waited,
                        purpose,
                        self.named(self._missing(roster)),
                        self.seconds,
                    ),
                )
            if watcher is not None and (ahead := watcher.look()) is not None:
                roster, is_complete = turn(roster, hello)  # a rank may have gone on after the meeting
                if is_complete:
                    break
                raise ahead
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if self.store is None:
            self.store = PrefixStore(roster.digest, self._hall)
        return [json.loads(said or "")[1] for said in roster.hellos]

    def agree(self, text: str, purpose: str, watcher: Watcher | None = None) -> None:
        """Return when every rank has come here with the same text. Raises DistributedError on all that names who has another one."""
        texts = self.meet(text, purpose, watcher)
        if len(set(texts)) > 1:
            deviating, _, own, others = first_difference(texts)
            raise DistributedError(
                f"{self.named(deviating)} differs from the others: it has {own}, and elsewhere there is {others}",
                hint=ALIKE,
            )

    def _lead(self, before: _Roster, hello: str) -> tuple[_Roster, bool]:
        """The first rank alone asks for all, so that a thousand ranks ask a thousand times."""
        roster = _Roster((hello, *self._heard("hello")[1:]))
        if roster != before:
            self._hall.set("roster", json.dumps(roster.hellos))
        if None in roster.hellos or set(self._heard("answer")[1:]) - {roster.digest}:
            return roster, False
        self._hall.set("done", roster.digest)
        return roster, True

    def _follow(self, answered: _Roster, hello: str) -> tuple[_Roster, bool]:
        """Answer each roster that has this rank's hello, until all have answered the same."""
        if not self._hall.check(["roster"]):
            return answered, False
        roster = _Roster(tuple(json.loads(self._hall.get("roster"))))
        # asked after the roster: one that follows a complete meeting is no longer answered
        if self._hall.check(["done"]) and self._hall.get("done").decode() == answered.digest:
            return answered, True
        if roster == answered or len(roster.hellos) != self.size or roster.hellos[self.rank] != hello:
            return answered, False
        self._hall.set(self.key("answer"), roster.digest)
        return roster, False

    def _missing(self, roster: _Roster) -> list[int]:
        answers = self._heard("answer")
        missing = [rank for rank in range(1, self.size) if answers[rank] != roster.digest]
        if self.rank and (roster.hellos[0] is None or not missing):
            missing = [0]  # it has not asked for answers, or not said that all have given them
        return missing

    def _too_late(self, roster: _Roster, purpose: str, watcher: Watcher | None) -> DistributedError:
        missing = self._missing(roster)
        last = "" if watcher is None else f"; {watcher.last(missing)}"
        return DistributedError(
            f"{self.named(missing)} did not come {purpose} within {self.seconds:g} seconds{last}",
            hint=RESTART,
        )

    def _heard(self, what: str) -> list[str | None]:
        return _words(self._hall, [self.key(what, rank) for rank in range(self.size)])

    def named(self, ranks: Sequence[int]) -> str:
        """rank 1; ranks 1, 2 and 5"""
        names = [str(self.names[rank]) for rank in ranks]
        if len(names) == 1:
            return f"rank {names[0]}"
        return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def first_difference(texts: Sequence[str]) -> tuple[list[int], int, str, str]:
    """Who has another text than most, and the number of the first line that differs, with the line there and elsewhere."""
    usual, _ = Counter(texts).most_common(1)[0]  # of several the first: that of the lowest rank
    deviating = [rank for rank, text in enumerate(texts) if text != usual]
    pairs = zip_longest(texts[deviating[0]].splitlines(), usual.splitlines(), fillvalue="no more")
    return deviating, *next((i, *pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])


def _words(store: Any, keys: Sequence[str]) -> list[str | None]:
    """What is there of these words."""
    if store.has_extended_api() and store.check(keys):  # in one go, which would wait for what is not there
        return [word.decode() for word in store.multi_get(keys)]
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


def in_time(ask: Callable[[], T], seconds: float = _ANSWER_SECONDS) -> T | None:
    """What a question to a store gives; None if the process that has the store is gone, or stopped."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:  # the connection is closed
            return

    thread = threading.Thread(target=run, name="monograph-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
