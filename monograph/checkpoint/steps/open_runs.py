"""The directories of checkpoints that managers of this process look after, and what they have saved there."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import ClassVar, Protocol


class _Run(Protocol):
    def of_another_run(self) -> Path | None:
        """The newest checkpoint in the directory, if it is of another run that this one does not go on from."""


class OpenRuns:
    """All of them, as long as somebody holds the manager; what was saved is known after that, too."""

    _all: ClassVar[weakref.WeakSet[_Run]] = weakref.WeakSet()
    _saved: ClassVar[set[str]] = set()  # the paths of checkpoints
    _lock: ClassVar[threading.Lock] = threading.Lock()  # other threads make managers

    @staticmethod
    def add(run: _Run) -> None:
        """One more."""
        with OpenRuns._lock:
            OpenRuns._all.add(run)

    @staticmethod
    def note_saved(path: Path) -> None:
        """This process has saved a checkpoint."""
        OpenRuns._saved.add(os.path.abspath(path))

    @staticmethod
    def note_removed(path: Path) -> None:
        """It is gone: what another process saves there is not of this one."""
        OpenRuns._saved.discard(os.path.abspath(path))

    @staticmethod
    def has_saved(path: Path) -> bool:
        """True if this process has saved a checkpoint, by whichever manager."""
        return os.path.abspath(path) in OpenRuns._saved

    @staticmethod
    def of_other_runs() -> list[Path]:
        """The newest checkpoints of directories that hold those of other runs, from which nobody goes on."""
        with OpenRuns._lock:
            runs = list(OpenRuns._all)
        found = [run.of_another_run() for run in runs]
        return sorted(path for path in found if path is not None)
