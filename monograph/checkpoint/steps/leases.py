"""Checkpoints that somebody has asked for: they stay while they are read, also beside a saver that removes old ones.

Two locks decide. A reader lists the steps and takes hold of one, a shared lock on its directory, while it holds a shared
lock on the directory of all. A saver takes a checkpoint away only while it holds both exclusively. So

- a listing is never torn: nothing is taken away during it, and a checkpoint that was there when it began is in it;
- what was listed can be held: nothing is taken away between the two;
- what is held stays: its lock cannot be had exclusively.

A saver puts the new checkpoint in place before it takes the old one away, hence a reader always finds one. No saver
waits for a reader: what it cannot take away now it takes away at a later save. The system drops the locks of a process
that dies. They are those of one machine: on a file system that is shared with others, `latest()` looks again when what
it listed has gone, and a larger `keep` gives a reader its time. So it is for a reader that goes on without the lock of a
saver that was stopped, which may wake up meanwhile.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from typing import Any, Final

from monograph.checkpoint.files import in_use, open_to_read, opened, opened_to_read, temporary_for, unlock

_TRIES: Final = 20
_PAUSE_SECONDS: Final = 0.001  # readers hold the directory of all for less


class Hold:
    """A checkpoint that no manager removes until this is released, or forgotten."""

    def __init__(self, path: Path) -> None:
        self._release = weakref.finalize(self, _let_go, open_to_read(path), os.getpid())
        self.used = False  # it was loaded

    def release(self) -> None:
        """Let it go; a second time does nothing."""
        self._release()


def _let_go(fd: int, process: int) -> None:
    if process == os.getpid():  # a forked process has the same lock, and must not drop it
        unlock(fd)
    os.close(fd)


class HeldPath(PosixPath):
    """A path whose checkpoint stays as long as somebody has the path; otherwise as any path."""

    hold: Hold | None = None

    def __repr__(self) -> str:
        return repr(Path(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Path, (str(self),)


def newest_held(directory: Path, steps: Callable[[], list[Path]]) -> HeldPath | None:
    """The last of the steps, held; None if there are none. `steps` lists those of the directory, the oldest first."""
    while True:
        try:
            with opened_to_read(directory):
                if not (listed := steps() or steps()):  # without a lock one listing may be torn
                    return None
                found = HeldPath(listed[-1])
                with suppress(OSError):  # what cannot be opened cannot be loaded either, and that is reported
                    found.hold = Hold(found)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if found.hold is not None or os.path.lexists(found):
            return found
        # Gone, with no regard to locks: it is not listed again.


@contextmanager
def nobody_lists(directory: Path) -> Iterator[bool]:
    """Inside, nobody takes hold of a step; False if others do so all the time."""
    with opened(directory) as fd:
        for _ in range(_TRIES):
            if not in_use(fd):
                yield True
                return
            time.sleep(_PAUSE_SECONDS)
        yield False


def taken_away(path: Path, *, also_held: bool = False) -> Path | None:
    """A name beside `path` that its checkpoint has now, out of everybody's sight; None if somebody holds it."""
    with opened(path) as fd:
        if in_use(fd) and not also_held:
            return None
        doomed = temporary_for(path)
        path.rename(doomed)
        return doomed
