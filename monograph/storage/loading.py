"""load(): what `save` wrote, told apart by its manifest. No content of a path shows itself as anything but our errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from monograph.config import BACKENDS
from monograph.errors import ArtifactError, CheckpointError
from monograph.storage.artifact import read_artifact
from monograph.storage.checkpoint import Checkpoint, reason_of
from monograph.storage.faults import Damaged
from monograph.storage.files import MANIFEST
from monograph.storage.held import HeldPath
from monograph.storage.manifest import ARTIFACT, FIRST_LINE, PROGRAM_FILE
from monograph.storage.members import begins_with, is_archive, opened_members
from monograph.storage.native import is_package, load_package
from monograph.storage.reading import Content, manifest_bytes, read

_TRIES: Final = 20
_HINT: Final = "load another checkpoint; CheckpointManager.latest() finds the newest one that is whole"


def load(path: str | os.PathLike[str], *, backend: str | None = None, trust: bool = False) -> Any:
    """Read what `save` wrote, verified byte by byte: a `Checkpoint`, which is a dict, or an `Artifact`.

    Nothing is executed unless it is trusted. Whatever is wrong is a `CheckpointError` or an `ArtifactError`. Of an artifact, `backend` says
    what runs it, by default what ran the graph; one that goes on training with random numbers sets torch's generator
    as it was. `trust=True` lets it call any op of torch, without checks of indices, and ops of other libraries, which
    this process has imported. A package of
    `export_aoti` is native code, which `trust=True` lets run: a `Package`, called like build().

    >>> import tempfile
    >>> path = mg.save({"weight": torch.ones(2)}, tempfile.mkdtemp() + "/checkpoint")
    >>> mg.load(path)["weight"]
    tensor([1., 1.])
    """
    asked, path = path, _path(path)
    if backend is not None and backend not in BACKENDS:
        raise ArtifactError(f"unknown backend {backend!r}", hint=f"choose one of {', '.join(BACKENDS)}")
    if is_package(path):
        if backend is not None:
            raise ArtifactError("a package is compiled already", hint="leave backend out")
        return load_package(path, trust=trust)
    with loading(path):
        content = _read(path)
        if content.manifest.kind != ARTIFACT:
            if isinstance(asked, HeldPath) and asked.hold is not None:
                asked.hold.used = True
            return Checkpoint(content.state, path, content.manifest.about)
        artifact = read_artifact(path, content, backend=backend, trust=trust)
        artifact.restore_random_state()
        return artifact


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at a path; CheckpointError for anything else."""
    path = _path(path)
    with loading(path):
        content = _read(path)
        if content.manifest.kind == ARTIFACT:
            raise Damaged("it is an artifact; load it with mg.load(path)")
        return Checkpoint(content.state, path, content.manifest.about)


def _path(path: object) -> Path:
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    nothing = "latest() gives None when there is no checkpoint yet: then begin from the start"
    raise CheckpointError(
        f"load() got {'None' if path is None else f'a {type(path).__name__}'} as its path",
        hint=nothing if path is None else "write mg.load(path)",
    )


def _read(path: Path) -> Content:
    for _ in range(_TRIES):
        with opened_members(path) as members:
            raw = manifest_bytes(members)
            try:
                return read(members, raw)
            except Damaged:
                if manifest_bytes(members) == raw:  # else another saver has just replaced it
                    raise
    raise Damaged("it is overwritten again and again")


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """The border: no content of a path may show itself as anything but a CheckpointError or an ArtifactError."""
    try:
        yield
    except Damaged as error:
        raise _failure(path, str(error)) from None
    except Exception as error:
        missing = "look at the path" if isinstance(error, FileNotFoundError) else None
        raise _failure(path, reason_of(error), missing) from error


def _failure(path: Path, reason: str, hint: str | None = None) -> CheckpointError | ArtifactError:
    message = f'cannot load "{path}": {reason}'
    if hint is None and _looks_like_an_artifact(path):
        return ArtifactError(message, hint="save the graph again, or load another artifact")
    return CheckpointError(message, hint=_HINT if hint is None else hint)


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
