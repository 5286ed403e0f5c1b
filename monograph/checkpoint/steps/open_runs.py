"""The directories of checkpoints that managers of this process look after."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import ClassVar, Protocol


class _Run(Protocol):
    def of_another_run(self) -> Path | None:
        """The newest checkpoint in the directory, if it is of another run that this one does not go on from."""


class OpenRuns:
    """All of them, as long as somebody holds the manager."""

    _all: ClassVar[weakref.WeakSet[_Run]] = weakref.WeakSet()

    @staticmethod
    def add(run: _Run) -> None:
        """One more."""
        OpenRuns._all.add(run)

    @staticmethod
    def of_other_runs() -> list[Path]:
        """The newest checkpoints of directories that hold those of other runs, from which nobody goes on."""
        found = [run.of_another_run() for run in list(OpenRuns._all)]
        return sorted(path for path in found if path is not None)
