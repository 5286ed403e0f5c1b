"""A directory of checkpoints that the ranks of a group write together: the first rank keeps it, as one process would."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from monograph.checkpoint.load import verify_share
from monograph.checkpoint.ranks.group import save_together, this_process, words_of_all
from monograph.checkpoint.save import saving
from monograph.checkpoint.steps.leases import HeldPath, Hold, newest_held
from monograph.checkpoint.steps.run import Run
from monograph.errors import CheckpointError

Saver: TypeAlias = Callable[[Any, Path, Callable[[], bool]], None]


def save_step(run: Run, state: Any, step: int, saver: Saver = save_together) -> None:
    """Save the states of all ranks under a step, and let the first rank remove old ones."""
    path = run.path(step)

    def replaces() -> bool:
        run.check(step)
        is_own = step in run.own
        run.own.add(step)
        return is_own

    try:
        saver(state, path, replaces)
    except BaseException:
        if not os.path.lexists(path):
            run.own.discard(step)
        raise
    if this_process().rank == 0:
        with saving(path):
            run.has_written(path)


def newest_whole(run: Run) -> HeldPath | None:
    """The newest checkpoint that is whole, the same on all ranks; each has verified a part of it."""
    process, damaged = this_process(), set[Path]()
    while True:
        found, said = None, {"name": "", "error": ""}
        if process.rank == 0:
            try:
                found = newest_held(run.directory, partial(run.paths_besides, damaged))
                said["name"] = "" if found is None else found.name
            except OSError as error:
                said["error"] = f'cannot look into "{run.directory}": {error.strerror}'
        said = json.loads(words_of_all(json.dumps(said), "to look for the newest checkpoint")[0])
        if said["error"]:
            raise CheckpointError(said["error"], hint="look at the path")
        if not said["name"]:
            return None
        path = found or _held(run.directory / said["name"])
        try:
            verify_share(path, process)
            trouble = ""
        except CheckpointError as error:
            trouble = error.message
        trouble = next(filter(None, words_of_all(trouble, "to verify the newest checkpoint")), "")
        if not trouble:
            return path
        if os.path.lexists(path):  # else it was removed with no regard to locks
            warnings.warn(f"skipped: {trouble}", stacklevel=3)
        damaged.add(run.directory / path.name)


def _held(path: Path) -> HeldPath:
    held = HeldPath(path)
    with suppress(OSError):  # what cannot be opened cannot be loaded either, and that is reported
        held.hold = Hold(held)
    return held
