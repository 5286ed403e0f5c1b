"""What the other ranks do: why a collective has failed, and whether it is in vain to wait for them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Final

from monograph.distributed.agreement.ranks import ALIKE, RESTART, WAITED, Ranks, in_time
from monograph.errors import DistributedError

BEAT_SECONDS: Final = 0.3
FAILED: Final = "failed"  # the key that says which rank has failed, for those that wait
UNBUILT: Final = (
    "unbuilt"  # by meeting, which rank will not come since its build has failed, how often, and why
)
_SILENT_SECONDS: Final = 1.2  # four beats: a rank that leaves none in that time is gone


@dataclass(frozen=True)
class Place:
    """Where a rank is: its steps so far, which one that is (below 0 beside steps), its build, and what it runs there.

    `unbuilt` is why it has no build for the next one.
    """

    call: int
    step: int
    build: int
    running: str  # the digest of its collectives
    doing: str = ""
    unbuilt: str = ""

    @property
    def text(self) -> str:
        """As it is in the store."""
        return json.dumps(astuple(self))

    @staticmethod
    def of(text: str) -> Place:
        """The place of a text."""
        return Place(*json.loads(text))

    def __str__(self) -> str:
        if self.step < 0:
            return f"in {self.doing}"
        doing = f", in {self.doing}" if self.doing else ""
        return f"in step {self.step} (build {self.build}{doing})"


@dataclass(frozen=True)
class Note:
    """What a rank leaves when it fails: nothing if a collective failed, else its own error or one that all have."""

    error: str
    is_shared: bool = False

    @property
    def text(self) -> str:
        """As it is in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Note:
        """The note of a text."""
        return Note(**json.loads(text))


@dataclass(frozen=True)
class Unbuilt:
    """What a rank says of a build that has failed, and how often that has been so."""

    rank: int
    times: int
    error: str

    @property
    def text(self) -> str:
        """As it is in the store."""
        return json.dumps(astuple(self))

    @staticmethod
    def of(text: str) -> Unbuilt:
        """What a text says."""
        return Unbuilt(*json.loads(text))

    def failure(self, name: str) -> DistributedError:
        """What others raise that wait for this rank, by its name."""
        return unbuilt(name, self.error)


def unbuilt(name: str, why: str) -> DistributedError:
    """What others raise that wait for a rank of this name, which has no build."""
    return DistributedError(f"{name} could not build its step: {why}", hint=RESTART)


@dataclass(frozen=True)
class _Seen:
    """What is known of each rank."""

    beats: Sequence[str | None]
    notes: Sequence[Note | None]
    places: Sequence[Place | None]


class Others:
    """The other ranks, as one sees them that has begun so many steps and is about to run these collectives.

    `unbuilt` is the key of a failed build, and how often one of this rank has failed: all may have failed alike.
    """

    def __init__(
        self, ranks: Ranks, calls: int, running: str, unbuilt: tuple[str, int] | None = None
    ) -> None:
        self._ranks = ranks
        self._calls = calls
        self._running = running
        self._unbuilt = unbuilt
        self._next_look = 0.0

    def look(self) -> DistributedError | None:
        """Raises DistributedError if one has failed, gives one if one runs other collectives already. At most once in a beat.

        The first rank looks at all, the others at it: of a thousand that wait one has much to read.
        """
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + BEAT_SECONDS
        ranks = self._ranks
        if (failed := ranks.read(FAILED)) is not None:
            note = Note.of(ranks.read(ranks.key("note", int(failed))) or "")
            who = "" if note.is_shared else f"{ranks.named([int(failed)])} failed: "
            raise DistributedError(f"{who}{note.error}", hint=RESTART)
        if self._unbuilt is not None and (said := ranks.read(self._unbuilt[0])) is not None:
            unbuilt = Unbuilt.of(said)
            if unbuilt.times > self._unbuilt[1]:
                raise unbuilt.failure(ranks.named([unbuilt.rank]))
        for rank in self._numbers() if ranks.rank == 0 else [0]:
            said = ranks.read(ranks.key("at", rank))
            place = None if said is None else Place.of(said)
            if place is not None and place.call > self._calls and place.running != self._running:
                return DistributedError(
                    f"{ranks.named([rank])} is {place} already and runs the collectives of an earlier step, "
                    f"while {ranks.named([ranks.rank])} has other ones to agree on",
                    hint=ALIKE,
                )
        return None

    def last(self, ranks: Sequence[int]) -> str:
        """What they did last."""
        return self._lasts(ranks, self._seen().places)

    def reason(self, here: Place, error: BaseException) -> DistributedError:
        """Why a collective of this rank has failed: who failed by itself, who is gone, who is late."""
        before = in_time(self._seen)
        if before is None:
            return self.no_store(here, error)
        time.sleep(_SILENT_SECONDS)
        after = in_time(self._seen)
        if after is None:
            return self.no_store(here, error)
        return self._told_apart(here, before, after, _first_line(error))

    def no_store(self, here: Place, error: BaseException) -> DistributedError:
        """The reason if the others cannot be asked about."""
        named = self._ranks.named
        return DistributedError(
            "the store of the process group does not answer: the process that has it is gone or stopped, which is "
            f"{named([0])} unless torchrun has it; {named([self._ranks.rank])} was {here} ({_first_line(error)})",
            hint=RESTART,
        )

    def _told_apart(self, here: Place, before: _Seen, after: _Seen, what: str) -> DistributedError:
        named, places, notes = self._ranks.named, after.places, after.notes
        found = {rank: note for rank in self._numbers() if (note := notes[rank]) is not None and note.error}
        own = [rank for rank, note in found.items() if not note.is_shared]
        if own:
            failed = (f"{named([rank])} failed {places[rank]}: {found[rank].error}" for rank in own)
            return DistributedError("; ".join(failed), hint=RESTART)
        unheard = [rank for rank in self._numbers() if notes[rank] is None]
        for rank in unheard:
            if (place := places[rank]) is not None and place.unbuilt:
                return unbuilt(named([rank]), place.unbuilt)
        if gone := [rank for rank in unheard if before.beats[rank] == after.beats[rank]]:
            return DistributedError(
                f"{named(gone)} {_are(gone)} gone or stopped: {self._lasts(gone, places)}", hint=WAITED
            )
        if found:
            return DistributedError(next(iter(found.values())).error, hint=RESTART)
        late = [rank for rank in unheard if (place := places[rank]) is None or place.call < here.call]
        if late := late or unheard:
            lasts = self._lasts(late, places)
            return DistributedError(
                f"{named(late)} {_are(late)} late: {lasts}, and the others waited {here} ({what})",
                hint=WAITED,
            )
        return DistributedError(f"a collective failed on all ranks {here}: {what}", hint=RESTART)

    def _lasts(self, ranks: Sequence[int], places: Sequence[Place | None]) -> str:
        return ", ".join(_last(self._ranks.named([rank]), places[rank]) for rank in ranks)

    def _numbers(self) -> list[int]:
        return [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]

    def _seen(self) -> _Seen:
        ranks = self._ranks
        notes = [None if said is None else Note.of(said) for said in ranks.read_all("note")]
        places = [None if said is None else Place.of(said) for said in ranks.read_all("at")]
        return _Seen(ranks.read_all("beat"), notes, places)


def error_line(error: BaseException) -> str:
    """An error in a line, for others to read."""
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _last(name: str, place: Place | None) -> str:
    return f"{name} had not begun a step" if place is None else f"{name} was last {place}"


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
