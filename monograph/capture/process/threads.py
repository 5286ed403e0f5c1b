"""What other threads do with the tensors of a step while it is captured: a trace records nothing of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from monograph.errors import CaptureError
from monograph.user_code.lines import user_place


@dataclass
class OtherThreads:
    """What they did during one trace."""

    started: list[str] = field(default_factory=list)  # one label if build() starts threads
    _faults: list[CaptureError] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)

    def note_start(self) -> None:
        """The step starts one: a replay would not."""
        self.started[:] = ["which threads run"]

    def note_use(self) -> None:
        """Called in another thread. It goes on, since the step may be waiting for it."""
        place = user_place(sys._getframe(1))
        where = place if place.file else user_place(sys._current_frames()[self._thread])
        self._faults.append(
            CaptureError(
                "build() works with tensors in another thread, of which a capture records nothing",
                where=where,
                hint="do all tensor work of a step in the thread that calls the graph; threads of Python are no "
                "faster for it, since torch's kernels have threads of their own",
            )
        )

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise what was noted inside, whatever else came of it."""
        try:
            yield
        except Exception as error:
            if self._faults:
                raise self._faults[0] from error
            raise
        if self._faults:
            raise self._faults[0]
