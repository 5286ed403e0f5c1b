"""A directory of checkpoints, one for each saved step: keeps the newest, finds the newest one that is whole."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from monograph.checkpoint.errors import Taken
from monograph.checkpoint.load import load_checkpoint
from monograph.checkpoint.ranks.group import State, background, in_group
from monograph.checkpoint.save import saving, take_apart
from monograph.checkpoint.steps.leases import HeldPath, Hold, newest_held
from monograph.checkpoint.steps.open_runs import OpenRuns
from monograph.checkpoint.steps.run import Run, step_of
from monograph.checkpoint.steps.together import newest_whole, save_step
from monograph.checkpoint.write import Parts, write
from monograph.errors import CheckpointError
from monograph.user_code.lines import Origin

LOGGER = logging.getLogger("monograph")


@dataclass
class _Failure:
    """The error of a write in the background that nobody has seen yet."""

    error: Exception | None = None

    def report(self) -> None:
        """The last chance, when the program ends."""
        if self.error is not None:
            warnings.warn(f"a save in the background failed: {self.error}", stacklevel=1)

    def raise_once(self) -> None:
        """Raise it, and forget it."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class CheckpointManager:
    """Saves to `directory/step-00001234`, removes all of its run but the newest `keep`, finds the newest one that is whole.

    A checkpoint that `latest()` has given stays while somebody has its path, also if another process saves. A directory
    belongs to one run: where there are checkpoints of this step or of higher ones that this manager has not saved, `save`
    is an error, or removes them with `rewind=True`. The one that its `latest()` gave may be saved again.

    A graph with an optimizer whose first step is made beside such a directory warns of that.

    With `every=n` only steps that are a multiple of n are saved. With `asynchronous=True` a save copies the tensors,
    returns, and writes in the background; `wait()` or the end of a `with` block waits for it and raises its error. If
    states come faster than they can be written, those between the first and the newest are left out, with a warning.

    In a process group every rank calls `save` and `latest`, with the same step: a checkpoint holds the
    states of all. There a save in the background waits for the one before, and none is left out.
    `together=False` is for a rank that keeps checkpoints of its own.

    >>> import tempfile
    >>> checkpoints = mg.CheckpointManager(tempfile.mkdtemp(), keep=2)
    >>> for step in range(4):
    ...     path = checkpoints.save({"weight": torch.zeros(2) + step}, step=step)
    >>> mg.load(checkpoints.latest())["weight"]
    tensor([3., 3.])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        every: int | None = None,
        asynchronous: bool = False,
        rewind: bool = False,
        together: bool | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"keep={keep}: at least one must be kept", hint="pass keep=None to keep all"
            )
        if every is not None and every < 1:
            raise CheckpointError(
                f"every={every}: a number of steps is at least 1", hint="leave it out to save always"
            )
        self.every = every
        self.asynchronous = asynchronous
        self.together = together
        self._run = Run(Path(directory), keep, rewind)
        OpenRuns.add(self._run)
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._newest: Hold | None = None  # for those who keep a path as a string
        self._thread: threading.Thread | None = None
        self._waiting: tuple[Parts, Path] | None = None  # what the thread writes next
        self._has_told = False  # that states are left out
        self._lock = threading.Lock()  # of the two
        self._background: Any = None  # of a group
        self._process = os.getpid()  # that has the three
        self._failure = _Failure()
        atexit.register(self._failure.report)  # it runs after the threads have ended

    def save(self, state_dict: State, *, step: int) -> Path | None:
        """Save a state, or what a function returns, under its step; None if this step is not to be saved.

        A step saved before is replaced. A function is called only if the state is needed.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(
                f"step={step!r} is no number of a step", hint="pass an int that is 0 or more"
            )
        self._failure.raise_once()
        together = in_group() if self.together is None else self.together
        if not together:
            self._run.check(step)
        if self.every is not None and step % self.every:
            return None
        path = self._run.path(step)
        self._let_go()
        if together:
            if self.asynchronous:
                self._save_behind(state_dict, step)
            else:
                save_step(self._run, state_dict, step)
            return path
        state = state_dict() if callable(state_dict) else state_dict
        with saving(path):
            parts = take_apart(state)
            if self.asynchronous:
                parts = parts.copied()
        if self.asynchronous:
            self._hand_over(parts, path)
        else:
            self._write(parts, path)
        return path

    def _let_go(self) -> None:
        """What this process asked for, loaded, and now saves beyond need not stay."""
        self._newest = None
        for hold in list(self._holds):
            if hold.used:
                hold.release()

    def _hand_over(self, parts: Parts, path: Path) -> None:
        """Let the thread write it, at once or after what it writes now; of several that wait the newest is written."""
        self._leave_to_the_parent()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write_behind, args=(parts, path), name="monograph-save"
                )
                self._thread.start()
                return
            left_out, self._waiting = self._waiting, (parts, path)
        if left_out is not None:
            said = f'"{left_out[1]}" is left out: it was still waiting to be written when a newer state came'
            LOGGER.info(said)
            if not self._has_told:
                self._has_told = True
                warnings.warn(
                    f"{said}. The newest state is always written, and training goes on; to have them all save less often "
                    "(every=...), or without asynchronous=True. Others that are left out are in the log at INFO",
                    stacklevel=3,
                )

    def _save_behind(self, state: State, step: int) -> None:
        """Save the states of all ranks beside the training, when the save before has ended on this rank."""
        self.wait()
        if self._background is None:
            self._background = background()
        copied, saver = self._background.copy_of(state), self._background.save
        writing = partial(save_step, self._run, copied, step, saver)
        self._thread = threading.Thread(target=self._run_behind, args=(writing,), name="monograph-save")
        self._thread.start()

    def _leave_to_the_parent(self) -> None:
        """After a fork the thread is in the other process, which writes what was handed over there."""
        if self._process != os.getpid():
            self._thread = self._waiting = None
            self._lock = threading.Lock()  # the old one may have been held
        self._process = os.getpid()

    def wait(self) -> None:
        """Return when nothing of this process is being written any more; raise the error of a save that failed."""
        self._leave_to_the_parent()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._failure.raise_once()

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, every byte of it verified; a warning names each that is not."""
        if in_group() if self.together is None else self.together:
            return self._taken(newest_whole(self._run))
        damaged: set[Path] = set()
        while True:
            steps = partial(self._run.paths_besides, damaged)
            if (found := newest_held(self.directory, steps)) is None:
                return None
            try:
                load_checkpoint(found)
            except CheckpointError as error:
                if os.path.lexists(found):  # else it was removed with no regard to locks
                    damaged.add(self.directory / found.name)
                    warnings.warn(f"skipped: {error.message}", stacklevel=2)
                continue
            return self._taken(found)

    def _taken(self, found: HeldPath | None) -> Path | None:
        """Remember what is given away."""
        if found is None:
            return None
        if found.hold is not None:
            self._holds.add(found.hold)
            self._newest = found.hold
        self._run.resumed = step_of(found)
        return found

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._run.directory

    @property
    def keep(self) -> int | None:
        """How many stay; None for all."""
        return self._run.keep

    @property
    def rewind(self) -> bool:
        """Whether checkpoints of other runs may go."""
        return self._run.rewind

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        else:
            try:
                self.wait()
            except CheckpointError as trouble:
                error.add_note(f"a save in the background failed too: {trouble}")

    def __repr__(self) -> str:
        rewind = ", rewind=True" if self.rewind else ""
        return (
            f"CheckpointManager({str(self.directory)!r}, keep={self.keep}, every={self.every}, "
            f"asynchronous={self.asynchronous}{rewind})"
        )

    def _write_behind(self, parts: Parts, path: Path) -> None:
        job: tuple[Parts, Path] | None = (parts, path)
        while job is not None:
            self._run_behind(partial(self._write, *job))
            with self._lock:
                job, self._waiting = self._waiting, None
                if job is None:
                    self._thread = None

    def _run_behind(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            error.where = Origin()  # no line of the user's is at work here
            self._failure.error = error
        except Exception as error:
            self._failure.error = error

    def _write(self, parts: Parts, path: Path) -> None:
        step, run = step_of(path), self._run
        replaces = step in run.own
        run.own.add(step)  # before it is there: the thread that trains may look for others' steps any time
        with saving(path):
            try:
                write(parts, path, overwrite=replaces)
            except Taken:  # by another run, since this step was found to be free
                run.own.discard(step)
                raise run.refusal(step, path) from None
            except BaseException:
                if not os.path.lexists(path):
                    run.own.discard(step)
                raise
            run.has_written(path)
