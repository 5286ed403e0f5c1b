"""Where this rank is, for the others to read when something fails; and what a failure of a collective becomes."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Final

from torch import distributed
from torch.distributed.distributed_c10d import Store

from monograph.distributed.agreement.others import BEAT_SECONDS, FAILED, Note, Others, Place, error_line
from monograph.distributed.agreement.ranks import RESTART, Ranks, in_time
from monograph.errors import DistributedError, TornStateError

_OF_GLOO: Final = re.compile(
    r"gloo|nccl|connection (closed|reset)|broken pipe|timed out|pair closure", re.IGNORECASE
)


class Watch:
    """Says where this rank is, and finds out about the others when a collective fails; made on every rank.

    A step says where it is by one word in the store, which nobody waits for. A thread leaves a sign of life there.
    """

    def __init__(self, ranks: Ranks) -> None:
        if ranks.store is None:
            ranks.meet("", "to begin")
        self.ranks = ranks
        self.calls = 0  # steps that have begun
        self.failure: DistributedError | None = None  # why no other step may begin
        self._key = ranks.key("at")
        self._place = Place(0, -1, -1, "")
        stop = threading.Event()
        arguments = stop, ranks.store, ranks.key("beat")
        thread = threading.Thread(target=_beat, args=arguments, name="monograph-beat", daemon=True)
        thread.start()
        # also when the interpreter ends, which a thread inside of the store would not survive
        self._end = weakref.finalize(self, _end, stop, thread)

    def close(self) -> None:
        """End the thread."""
        self._end()

    def begin(self, step: int, build: int, running: str = "") -> None:
        """A step begins. Raises DistributedError if one has failed: a rank that goes on alone computes something else."""
        if self.failure is not None:
            raise DistributedError(self.failure.message, hint=RESTART)
        self.calls += 1
        self._place = Place(self.calls, step, build, running)
        self._show()

    def doing(self, what: str) -> None:
        """Say what this rank does inside of its step."""
        self._place = replace(self._place, doing=what)
        self._show()

    def not_built(self, why: str) -> None:
        """Say that this rank has no build for its next step, for others that wait for it in a collective."""
        self._place = replace(self._place, unbuilt=why)
        in_time(lambda: bool(self.ranks.store.set(self._key, self._place.text)))

    @contextmanager
    def step(self, step: int, build: int, running: str = "") -> Iterator[None]:
        """Inside, a step runs its collectives: one that fails becomes a DistributedError that names who is missing."""
        self.begin(step, build, running)
        try:
            yield
        except BaseException as error:
            found = self.failed(error)
            if found is error:
                raise
            raise found from error

    def failed(self, error: BaseException) -> BaseException:
        """What to raise for the error of a step: itself if it is this rank's own, and then the others read of it."""
        if isinstance(error, DistributedError):
            self.failure = error
            self._say(Note(error.message, is_shared=True))
            return error
        if not _is_of_collectives(error):
            said = error_line(error)
            self.failure = DistributedError(f"a step of this rank failed: {said}", hint=RESTART)
            self._say(Note(said))
            return error
        others = self.others("")
        self.failure = (
            others.reason(self._place, error) if self._say(Note("")) else others.no_store(self._place, error)
        )
        return self.failure

    def others(self, running: str) -> Others:
        """What the other ranks do, for one that is about to run these collectives."""
        return Others(self.ranks, self.calls, running)

    def _show(self) -> None:
        try:
            self.ranks.store.set(self._key, self._place.text)
        except RuntimeError as error:
            raise self.failed(error) from error

    def _say(self, note: Note) -> bool:
        """Leave a note; False if there is no store any more that would take it."""
        store, key = self.ranks.store, self.ranks.key("note")

        def leave() -> bool:
            store.set(key, note.text)
            if note.error:
                store.set(FAILED, str(self.ranks.rank))
            return bool(store.check([key]))

        return bool(in_time(leave))


def _is_of_collectives(error: BaseException) -> bool:
    """True for errors of torch.distributed, and for those of gloo, which are no more than RuntimeErrors.

    Also for that of a step which had begun to change its state.
    """
    if isinstance(error, TornStateError) and error.__cause__ is not None:
        return _is_of_collectives(error.__cause__)
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _OF_GLOO.search(str(error)) is not None


def _beat(stop: threading.Event, store: Store, key: str) -> None:
    """The thread."""
    try:
        for number in count():
            store.set(key, str(number))
            if stop.wait(BEAT_SECONDS):
                return
    except RuntimeError:  # the store is gone, and so is the job, as its next step will find
        return


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(BEAT_SECONDS)
