"""Writing a checkpoint or an artifact, so that at each moment its directory holds the old state or the new one, whole.

A new checkpoint is written beside its place and renamed. An overwritten one gets its new files beside the old ones, then
a new manifest by one rename, which is the moment it changes; the old files go last.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from monograph.checkpoint.archive import ARCHIVE_SUFFIX, Directory, pack_directory
from monograph.checkpoint.bytes import Row, on_host, row_of
from monograph.checkpoint.errors import Damaged, Refused, Taken
from monograph.checkpoint.files import (
    MANIFEST,
    alone,
    foreign_files,
    is_ours,
    new_directory,
    new_file,
    new_token,
    opened,
    opened_to_write,
    remove_abandoned,
    remove_checkpoint,
    remove_files,
    sync,
    temporary_for,
    unfinished_manifest,
)
from monograph.checkpoint.flatten import Flat, LocalOf, flatten, no_local
from monograph.checkpoint.leaves import Json
from monograph.checkpoint.manifest import (
    ABOUT_KEY,
    ARTIFACT,
    MAX_TENSORS,
    Document,
    Manifest,
    TensorFile,
    from_bytes,
    read_about,
    to_bytes,
)
from monograph.checkpoint.read import manifest_bytes
from monograph.checkpoint.tensor_file import write_all, write_tensors
from monograph.compat.tensors import changes_of

SHARD_BYTES: Final = 4 << 30
SHARD_TENSORS: Final = 100_000  # keeps the header below what safetensors reads


@dataclass(frozen=True)
class Programs:
    """What makes an artifact of a state: signatures, which name programs by their numbers, and the programs as JSON."""

    signatures: Callable[[Sequence[str]], Json]  # given the names of the files
    documents: tuple[bytes, ...]


@dataclass(frozen=True)
class Parts:
    """A state ready to be written: nothing in it can be refused any more."""

    flat: Flat
    about: Mapping[str, Any]
    programs: Programs | None = None  # of an artifact
    versions: Mapping[str, int | None] = field(
        default_factory=dict
    )  # of the tensors, when the state was taken apart
    local_of: LocalOf = no_local

    def check_unchanged(self) -> None:
        """`Refused` if a tensor was changed since: what was written until now is part old and part new."""
        for name, version in self.versions.items():
            if _version(self.flat.tensors[name], self.local_of) != version:
                raise Refused(
                    f"{name} was changed while it was saved: a step ran in another thread, and the checkpoint would be "
                    "part old and part new",
                    "save between two steps, in the thread that trains; CheckpointManager(..., asynchronous=True) copies "
                    "the state there and writes beside the training",
                )

    def copied(self) -> Parts:
        """The same with tensors of its own, on the host."""
        tensors = {
            name: on_host(tensor, row_of(name, tensor), copy=True)
            for name, tensor in self.flat.tensors.items()
        }
        self.check_unchanged()
        return replace(self, flat=Flat(self.flat.tree, tensors), versions={})


def _version(tensor: torch.Tensor, local_of: LocalOf) -> int | None:
    """How often a tensor was written to; None where nobody counts."""
    local = local_of(tensor)
    tensor = tensor if local is None else local
    return None if tensor.is_inference() else changes_of(tensor)


def prepare(state: dict[Any, Any], local_of: LocalOf = no_local) -> Parts:
    """Take a state apart; `Refused` if it has no place in a checkpoint."""
    flat = flatten(state, local_of)
    if len(flat.tensors) > MAX_TENSORS:
        raise Refused(
            f"the state has more than {MAX_TENSORS:,} tensors", "join small tensors into large ones"
        )
    try:
        about = read_about(state.get(ABOUT_KEY, {}))
    except Damaged as error:
        raise Refused(f"{ABOUT_KEY}: {error}", "this key is for what a graph says of itself") from None
    versions = {name: _version(tensor, local_of) for name, tensor in flat.tensors.items()}
    return Parts(flat, about, versions=versions, local_of=local_of)


def write(parts: Parts, path: Path, *, overwrite: bool) -> None:
    """Write a checkpoint; raises `Refused` and `OSError`, and then leaves what was there as it was."""
    is_archive = path.suffix == ARCHIVE_SUFFIX
    if overwrite and path.is_dir():
        _write_into(parts, path)
        return
    if os.path.lexists(path) and not (overwrite and is_archive and path.is_file()):
        raise existing(overwrite)
    with parents_made(path):
        try:
            if is_archive:
                _write_archive(parts, path, overwrite=overwrite)
            else:
                _write_beside(parts, path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not overwrite or is_archive:
                raise existing(overwrite) from None
            _write_into(parts, path)  # another saver was faster


@contextmanager
def parents_made(path: Path) -> Iterator[None]:
    """Inside, the directory of a path is there, without what killed savers left for it; then it is on the disk."""
    new_parents = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, re.compile(re.escape(path.name)))
    yield
    for parent in (path.parent, *(parent.parent for parent in new_parents)):
        with opened(parent) as fd:
            sync(fd)


def _write_beside(parts: Parts, path: Path) -> None:
    with place_beside(path) as place:
        place.commit(to_bytes(_write_files(parts, place.fd, place.token)))


def _write_into(parts: Parts, path: Path) -> None:
    with place_inside(path) as place:
        place.commit(to_bytes(_write_files(parts, place.fd, place.token)))


class Place(Protocol):
    """A directory where the files of a checkpoint are written, until its manifest makes them one."""

    directory: Path
    fd: int
    token: str  # in the names of the files

    def commit(self, raw: bytes) -> None:
        """Write the manifest: after this moment the checkpoint is the new one."""


@dataclass
class _Beside:
    """A temporary directory, which is renamed."""

    directory: Path
    fd: int
    token: str
    path: Path

    def commit(self, raw: bytes) -> None:
        with new_file(MANIFEST, self.fd) as file:
            write_all(file, raw)
        sync(self.fd)
        self.directory.rename(self.path)


@dataclass
class _Inside:
    """The directory of a checkpoint that is overwritten: its manifest is renamed."""

    directory: Path
    fd: int
    token: str
    raw: bytes | None = None
    unfinished: str = field(default_factory=unfinished_manifest)

    def commit(self, raw: bytes) -> None:
        self.raw = raw
        with new_file(self.unfinished, self.fd) as file:
            write_all(file, raw)
        sync(self.fd)
        os.rename(self.unfinished, MANIFEST, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        sync(self.fd)


@contextmanager
def place_beside(path: Path) -> Iterator[Place]:
    """A place for a checkpoint that is not there yet. Raises OSError at its commit if another saver was faster."""
    temporary, fd = new_directory(path)
    try:
        yield _Beside(temporary, fd, new_token(), path)
    except BaseException:
        with suppress(OSError):
            remove_checkpoint(temporary)  # not there any more if the rename was done
        raise
    finally:
        os.close(fd)


@contextmanager
def place_inside(path: Path) -> Iterator[Place]:
    """A place among the files of an older checkpoint, which go last."""
    with opened_to_write(path) as fd:
        foreign = foreign_files(fd)
        if foreign:
            raise Refused(
                f"it holds {foreign[0]!r}, which is no part of a checkpoint", "remove it, or use another path"
            )
        before = _manifest_if_any(fd)
        place = _Inside(path, fd, new_token())
        try:
            yield place
        except BaseException:
            # an interrupt may come after the rename: then the files are those of the checkpoint
            if place.raw is None or _manifest_if_any(fd) != place.raw:
                killed = [name for name in os.listdir(fd) if place.token in name or name == place.unfinished]
                remove_files(fd, killed)
            raise
        with suppress(OSError):  # they cost space and do no harm
            remove_files(fd, _unused(fd, before))


def _write_archive(parts: Parts, path: Path, *, overwrite: bool) -> None:
    """Write to a temporary directory, pack that into a temporary file, and rename the file."""
    directory, file = temporary_for(path), temporary_for(path)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_beside(parts, directory)
        pack_directory(directory, fd)
        os.fsync(fd)
        if overwrite:
            os.replace(file, path)
        else:
            os.link(file, path)  # unlike a rename it does not replace what another saver wrote meanwhile
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            file.unlink()
        with suppress(OSError):
            remove_checkpoint(directory)


def _unused(fd: int, before: bytes | None) -> list[str]:
    """What killed savers left, and older checkpoints; if others are writing, only the checkpoint that was replaced."""
    is_alone = alone(fd)
    # asked for now that nobody can change it: another saver may have come in between
    used = _files_of(_manifest_if_any(fd))
    if not used:
        return []
    names = [name for name in os.listdir(fd) if is_ours(name)] if is_alone else _files_of(before)
    return [name for name in names if name not in used]


def _files_of(raw: bytes | None) -> list[str]:
    """The files that a manifest makes those of a checkpoint, itself among them; none if it is damaged."""
    try:
        return [MANIFEST, *(file.name for file in from_bytes(raw or b"").entries)]
    except Damaged:
        return []


def _write_files(parts: Parts, directory: int, token: str) -> Manifest:
    files = []
    for number, shard in enumerate(_shards(parts.flat.tensors)):
        name = f"tensors-{token}-{number:05}.safetensors"
        rows = tuple(row for row, _tensor in shard)
        with new_file(name, directory) as fd:
            written = write_tensors(fd, rows, [tensor for _row, tensor in shard])
        files.append(TensorFile(name, written.num_bytes, written.sha256, rows))
    parts.check_unchanged()
    programs = parts.programs
    if programs is None:
        return Manifest(parts.about, tuple(files), parts.flat.tree)
    documents = []
    for number, raw in enumerate(programs.documents):
        document = Document(f"program-{token}-{number:05}.json", len(raw), hashlib.sha256(raw).hexdigest())
        with new_file(document.name, directory) as fd:
            write_all(fd, raw)
        documents.append(document)
    signatures = programs.signatures([document.name for document in documents])
    return Manifest(parts.about, tuple(files), parts.flat.tree, ARTIFACT, signatures, tuple(documents))


def _shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[Row, torch.Tensor]]]:
    """What goes into each file; large elements first, so that every tensor of a file is aligned to its own."""
    shard: list[tuple[Row, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if shard and (num_bytes + tensor.nbytes > SHARD_BYTES or len(shard) == SHARD_TENSORS):
            yield shard
            shard, num_bytes = [], 0
        shard.append((row_of(name, tensor), tensor))
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def _manifest_if_any(directory: int) -> bytes | None:
    try:
        return manifest_bytes(Directory(directory))
    except (Damaged, OSError):
        return None


def existing(overwrite: bool) -> Refused:
    """The refusal of a path that is taken."""
    if overwrite:
        return Refused("it exists and is no directory", "remove it, or use another path")
    return Taken("it exists already", "pass overwrite=True to replace it, or use another path")
