"""Which checkpoints of a directory are of this run, which are there, and which go."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from monograph.checkpoint.files import remove_abandoned, remove_checkpoint
from monograph.checkpoint.load import load_checkpoint
from monograph.checkpoint.read import is_complete
from monograph.checkpoint.steps.leases import nobody_lists, taken_away
from monograph.checkpoint.steps.open_runs import OpenRuns
from monograph.errors import CheckpointError

_STEP: Final = re.compile(r"step-([0-9]{8,18})")


@dataclass(eq=False)
class Run:
    """The directory of a manager, and the steps in it that are its own."""

    directory: Path
    keep: int | None
    rewind: bool
    own: set[int] = field(default_factory=set)  # of this run, and damaged ones, which are of no run
    resumed: int | None = None  # the step that latest() gave

    def check(self, step: int) -> None:
        """What another run left must not be taken for what this one saves."""
        if step == self.resumed:
            self.own.add(step)
        there = [(number, path) for number, path in self.steps() if number >= step and number not in self.own]
        damaged = {number for number, path in there if not _is_whole(path)}
        self.own |= damaged
        others = [(number, path) for number, path in there if number not in damaged]
        if not others:
            return
        if not self.rewind:
            raise self.refusal(step, others[-1][1])
        # the highest first: at any moment latest() is of the steps before
        for number, path in reversed(others):
            if number > step:
                self._remove(path)
        self.own.add(step)

    def of_another_run(self) -> Path | None:
        """The newest checkpoint there, if this run has saved none, asked for none, and removes none."""
        if self.rewind or self.own or self.resumed is not None:
            return None
        return next((path for _step, path in reversed(self.steps()) if _is_whole(path)), None)

    def refusal(self, step: int, other: Path) -> CheckpointError:
        """The error for a step that is not saved because of a checkpoint of another run."""
        return CheckpointError(
            f'step {step} is not saved: "{self.directory}" holds {other.name} of another run',
            hint="to go on with that run, load what latest() of this manager gives; to begin anew, use a directory for each "
            "run; CheckpointManager(..., rewind=True) removes the checkpoints of this step and of higher ones",
        )

    def has_written(self, newest: Path) -> None:
        """This run has saved a step: it is this process's own from now on, and older ones may go."""
        OpenRuns.note_saved(newest)
        self._remove_old(newest)

    def _remove_old(self, newest: Path) -> None:
        """Remove complete checkpoints of this run beyond `keep`, never the one just written; damaged ones stay to be looked at.

        What somebody reads now is left for a later save. Those of other runs stay, and so do higher steps of others, which
        went on while this process was stopped.
        """
        remove_abandoned(self.directory, _STEP)
        others = [(step, path) for step, path in self.steps() if path != newest and self._is_mine(step)]
        if self.keep is None or len(others) < self.keep:
            return
        complete = [(step, path) for step, path in others if is_complete(path)]
        for step, path in complete[: max(len(complete) - self.keep + 1, 0)]:
            if step < step_of(newest) or step in self.own:
                self._remove(path, newest=newest)

    def _is_mine(self, step: int) -> bool:
        """True for a step of this process, or of the run that it goes on from; `rewind` takes over what is there."""
        goes_on = self.resumed is not None and step <= self.resumed
        return self.rewind or goes_on or step in self.own or OpenRuns.has_saved(self.path(step))

    def _remove(self, path: Path, *, newest: Path | None = None) -> None:
        """Remove it at once, or if there is a `newest`, only while that one stays and nobody holds this one."""
        doomed = None
        try:
            with nobody_lists(self.directory) as quiet:
                if newest is None or (quiet and newest.exists()):
                    doomed = taken_away(path, also_held=newest is None)
            if doomed is not None:
                OpenRuns.note_removed(path)
                remove_checkpoint(doomed)
        except FileNotFoundError:
            pass  # another process removes it too
        except OSError as error:
            warnings.warn(f'cannot remove the old checkpoint "{path}": {error.strerror}', stacklevel=2)

    def steps(self) -> list[tuple[int, Path]]:
        """The directories of steps, the oldest first."""
        try:
            names = os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [(_STEP.fullmatch(name), self.directory / name) for name in names]
        steps = [(int(match[1]), path) for match, path in found if match is not None]
        return sorted((step, path) for step, path in steps if path == self.path(step))

    def paths_besides(self, damaged: Container[Path]) -> list[Path]:
        return [path for _step, path in self.steps() if path not in damaged]

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def _is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError:
        return False
    return True
