"""The ranks of a process group, which leave each other words in its store: no tensors, no collectives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from monograph.errors import DistributedError

_FIRST_PAUSE: Final = (
    0.0002  # seconds between two looks at the store; it grows, since who waits long waits for much
)
_LONGEST_PAUSE: Final = 0.02
_ANSWER_SECONDS: Final = 1.8  # that a store may take which is not known to be there still

RESTART: Final = (
    "this graph cannot go on: end all ranks and start them again from the newest checkpoint, as "
    "torchrun --max-restarts does"
)

T = TypeVar("T")


class Watcher(Protocol):
    """Who knows what the other ranks do."""

    def look(self) -> None:
        """Raises DistributedError if waiting for them is in vain."""

    def last(self, ranks: Sequence[int]) -> str:
        """What they did last."""


class Ranks:
    """The ranks of a group, by their numbers in it; `names` are those of the whole job.

    Made on every rank, in the same order for each name. `seconds` is how long they wait for each other, by default
    what the store of the group waits, which is the timeout of a group that torchrun's environment made.
    """

    def __init__(
        self, name: str, group: distributed.ProcessGroup | None = None, *, seconds: float | None = None
    ) -> None:
        group = group or distributed.group.WORLD
        if group is None:
            raise DistributedError(
                "there is no process group", hint="call torch.distributed.init_process_group() first"
            )
        self.rank, self.size = group.rank(), group.size()
        self.names: Sequence[int] = distributed.get_process_group_ranks(group)
        store: Any = group.get_group_store()
        self.seconds = store.timeout.total_seconds() if seconds is None else seconds
        number = store.add(
            f"monograph/{name}/{self.rank}", 1
        )  # the same on each rank, also after others were made
        # the connection of the group: a server of torch that gets a new one may look up its name, for seconds
        self.store: Any = PrefixStore(f"monograph/{name}/{number}", store)
        self._meetings = 0

    def key(self, what: str, rank: int | None = None) -> str:
        """Where a rank, by default this one, leaves a word."""
        return f"{what}/{self.rank if rank is None else rank}"

    def read(self, key: str) -> str | None:
        """A word, if it is there."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def read_all(self, what: str) -> list[str | None]:
        """The word of each rank, if it is there."""
        keys = [self.key(what, rank) for rank in range(self.size)]
        if self.store.has_extended_api() and self.store.check(
            keys
        ):  # in one go; it waits for what is not there
            return [word.decode() for word in self.store.multi_get(keys)]
        return [self.read(key) for key in keys]

    def meet(self, word: str, purpose: str, watcher: Watcher | None = None) -> list[str]:
        """Wait until every rank has come here, with a word; all words, on all ranks.

        `purpose` says in errors what it is for. Raises DistributedError that names who has not come in time.
        """
        number, self._meetings = self._meetings, self._meetings + 1
        here, done = f"meeting/{number}", f"meeting/{number}/all"
        self.store.set(self.key(here), word)
        come = [self.key(here, rank) for rank in range(self.size)] if self.rank == 0 else [done]
        if not self._wait(come, watcher):
            missing = [rank for rank, said in enumerate(self.read_all(here)) if said is None] or [0]
            last = "" if watcher is None else f"; {watcher.last(missing)}"
            raise DistributedError(
                f"{self.named(missing)} did not come {purpose} within {self.seconds:g} seconds{last}",
                hint=RESTART,
            )
        if self.rank == 0:  # it alone asks for all, so that a thousand ranks ask a thousand times
            words = [self.store.get(key).decode() for key in come]
            self.store.set(done, json.dumps(words))
        else:
            words = json.loads(self.store.get(done))
        if number:  # all have come here, so they have read what was said at the meeting before
            self.store.delete_key(self.key(f"meeting/{number - 1}"))
            if self.rank == 0:
                self.store.delete_key(f"meeting/{number - 1}/all")
        return words

    def _wait(self, keys: list[str], watcher: Watcher | None) -> bool:
        """True when these words are there, False if they are not in time."""
        end, pause = time.monotonic() + self.seconds, _FIRST_PAUSE
        while not self.store.check(keys):
            if time.monotonic() > end:
                return False
            if watcher is not None:
                watcher.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def named(self, ranks: Sequence[int]) -> str:
        """rank 1; ranks 1, 2 and 5"""
        names = [str(self.names[rank]) for rank in ranks]
        if len(names) == 1:
            return f"rank {names[0]}"
        return f"ranks {', '.join(names[:-1])} and {names[-1]}"


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
