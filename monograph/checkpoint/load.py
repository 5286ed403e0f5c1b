"""A checkpoint is read whole, or not at all. No content of a path shows itself as anything but our errors."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from monograph.checkpoint.archive import begins_with, is_archive, opened_entries
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.files import MANIFEST
from monograph.checkpoint.manifest import ARTIFACT, FIRST_LINE, PROGRAM_FILE, from_bytes
from monograph.checkpoint.read import ALONE, Content, Process, check_names, manifest_bytes, read, read_file
from monograph.checkpoint.save import Checkpoint, reason_of
from monograph.errors import ArtifactError, CheckpointError

_TRIES: Final = 20
HINT: Final = "load another checkpoint; CheckpointManager.latest() finds the newest one that is whole"


def load_checkpoint(path: str | os.PathLike[str], process: Process = ALONE) -> Checkpoint:
    """The checkpoint at a path, of many ranks that of a process; CheckpointError for anything else."""
    path = path_of(path)
    with loading(path):
        content = read_whole(path, process)
        if content.manifest.kind == ARTIFACT:
            raise Damaged("it is an artifact; load it with mg.load(path)")
        return Checkpoint(content.state, path, content.manifest.about)


def verify_share(path: Path, process: Process) -> None:
    """Verify every n-th file of a checkpoint, for one of n processes; CheckpointError if one of them is damaged."""
    with loading(path), opened_entries(path) as entries:
        manifest = from_bytes(manifest_bytes(entries))
        check_names(entries)
        for file in manifest.files[process.rank :: process.size]:
            deque(read_file(entries, file), maxlen=0)  # to the end, and nothing is kept


def path_of(path: object) -> Path:
    """What `load()` got as its path; CheckpointError for what is none."""
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    nothing = "latest() gives None when there is no checkpoint yet: then begin from the start"
    raise CheckpointError(
        f"load() got {'None' if path is None else f'a {type(path).__name__}'} as its path",
        hint=nothing if path is None else "write mg.load(path)",
    )


def read_whole(path: Path, process: Process = ALONE) -> Content:
    """All that a path holds, of one saver where another one replaces it meanwhile."""
    for _ in range(_TRIES):
        with opened_entries(path) as entries:
            raw = manifest_bytes(entries)
            try:
                return read(entries, raw, process)
            except Damaged:
                if manifest_bytes(entries) == raw:  # else another saver has just replaced it
                    raise
    raise Damaged("it is overwritten again and again")


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """The boundary: no content of a path may show itself as anything but a CheckpointError or an ArtifactError."""
    try:
        yield
    except Damaged as error:
        failure = _failure(path, str(error))
        failure.hint = error.hint or failure.hint
        raise failure from None
    except Exception as error:
        missing = "look at the path" if isinstance(error, FileNotFoundError) else None
        raise _failure(path, reason_of(error), missing) from error


def _failure(path: Path, reason: str, hint: str | None = None) -> CheckpointError | ArtifactError:
    message = f'cannot load "{path}": {reason}'
    if hint is None and _looks_like_an_artifact(path):
        return ArtifactError(message, hint="save the graph again, or load another artifact")
    return CheckpointError(message, hint=HINT if hint is None else hint)


def _looks_like_an_artifact(path: Path) -> bool:
    """What a damaged path was meant to be: artifacts hold programs, and only they may be one file."""
    try:
        if not path.is_dir():
            return is_archive(path)
        if any(PROGRAM_FILE.fullmatch(name) for name in os.listdir(path)):
            return True
        return begins_with(path / MANIFEST, FIRST_LINE.format(ARTIFACT).encode())
    except OSError:
        return False
