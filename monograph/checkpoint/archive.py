"""Where the files of a checkpoint or an artifact are: in a directory, or in one file that contains them unchanged.

The one file is a ZIP without compression, as any tool can open; a name, a size or a place in it that `pack_directory`
would not have written is `Damaged`.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.files import directory_files, is_ours, open_entry, opened_to_read
from monograph.checkpoint.manifest import MAX_FILES

ARCHIVE_SUFFIX: Final = ".zip"  # of a path that is one file
_MAX_DIRECTORY_BYTES: Final = 4 << 20  # of the list of entries
_END: Final = struct.Struct("<4s4H2LH")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_COPIED_BYTES: Final = 1 << 20
_MOST_OPENED: Final = 256  # at once: a process may have some more


class ArchiveEntries(Protocol):
    """Files by their names."""

    def names(self) -> list[str]:
        """All of them."""

    def open_entry(self, name: str) -> AbstractContextManager[tuple[int, int]]:
        """One file, as a descriptor that stands at its beginning and the number of its bytes."""

    def opened(self, names: Sequence[str]) -> AbstractContextManager[ArchiveEntries]:
        """The same with these files open, each to be read once: a saver may remove them meanwhile."""


@dataclass(frozen=True)
class Directory:
    """The files of an open directory."""

    fd: int

    def names(self) -> list[str]:
        return directory_files(self.fd)

    def open_entry(self, name: str) -> AbstractContextManager[tuple[int, int]]:
        return open_entry(name, self.fd)

    @contextmanager
    def opened(self, names: Sequence[str]) -> Iterator[ArchiveEntries]:
        if len(names) > _MOST_OPENED:
            yield self
            return
        with ExitStack() as stack:
            yield _Opened({name: stack.enter_context(self.open_entry(name)) for name in names})


@dataclass(frozen=True)
class _Opened:
    """Files of a directory that are open already."""

    files: dict[str, tuple[int, int]]

    def names(self) -> list[str]:
        return list(self.files)

    def open_entry(self, name: str) -> AbstractContextManager[tuple[int, int]]:
        return nullcontext(self.files[name])

    def opened(self, names: Sequence[str]) -> AbstractContextManager[ArchiveEntries]:
        return nullcontext(self)


@dataclass(frozen=True)
class Archive:
    """The entries of an open file: where each begins, and its bytes."""

    fd: int
    places: dict[str, tuple[int, int]]

    def names(self) -> list[str]:
        return list(self.places)

    @contextmanager
    def open_entry(self, name: str) -> Iterator[tuple[int, int]]:
        if name not in self.places:
            raise Damaged(f"it has no {name}")
        start, num_bytes = self.places[name]
        os.lseek(self.fd, start, os.SEEK_SET)
        yield self.fd, num_bytes

    def opened(self, names: Sequence[str]) -> AbstractContextManager[ArchiveEntries]:
        return nullcontext(self)  # the one file is open


@contextmanager
def opened_entries(path: Path) -> Iterator[ArchiveEntries]:
    """What a path holds, a directory or one file."""
    if not is_archive(path):
        with opened_to_read(path) as fd:
            yield Directory(fd)
        return
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield Archive(fd, _places(fd))
    finally:
        os.close(fd)


def is_archive(path: Path) -> bool:
    """True for a plain file that is one by its name or its first bytes."""
    return path.is_file() and (path.suffix == ARCHIVE_SUFFIX or begins_with(path, b"PK\3\4"))


def begins_with(file: Path, expected: bytes) -> bool:
    """True for a plain file with these first bytes."""
    if not file.is_file():
        return False
    with open(file, "rb") as opened_file:
        return opened_file.read(len(expected)) == expected


def pack_directory(directory: Path, fd: int) -> None:
    """Write the files of a directory into one file."""
    with os.fdopen(os.dup(fd), "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(os.listdir(directory)):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.file_size = (directory / name).stat().st_size
            with open(directory / name, "rb") as source, archive.open(entry, "w") as target:
                while chunk := source.read(_COPIED_BYTES):
                    target.write(chunk)


@contextmanager
def opened_archive(fd: int) -> Iterator[zipfile.ZipFile]:
    """An open file as a ZIP whose entries are as long as they say. `Damaged` if it is none, or fails while it is read."""
    _check_end(fd, os.fstat(fd).st_size)
    with os.fdopen(os.dup(fd), "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                        raise Damaged(f"its entry {entry.filename[:80]!r} is compressed")
                yield archive
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error) as error:
            raise Damaged(f"it is no archive of ours: {error}") from None


def _places(fd: int) -> dict[str, tuple[int, int]]:
    num_bytes = os.fstat(fd).st_size
    with opened_archive(fd) as archive:
        entries = archive.infolist()
    found: dict[str, tuple[int, int]] = {}
    for entry in entries:
        if entry.filename.endswith("/data.pkl"):
            raise Damaged(
                "it is a file of torch.save()",
                hint="read it with torch.load(), and load what it holds into the model and the optimizer",
            )
        if entry.flag_bits & ~0x0808 or not is_ours(entry.filename) or entry.filename in found:
            raise Damaged(f"it holds {entry.filename[:80]!r}, which is no part of it")
        found[entry.filename] = (_start(fd, entry, num_bytes), entry.file_size)
    spans = sorted((start, start + size) for start, size in found.values())
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise Damaged("its entries overlap")
    return found


def _check_end(fd: int, num_bytes: int) -> None:
    """Look at the size of the list of entries before it is read into memory."""
    end = os.pread(fd, _END.size, max(0, num_bytes - _END.size))
    if len(end) != _END.size or not end.startswith(b"PK\5\6"):
        raise Damaged("it is no archive of ours, or was cut off")
    _, _, _, _, count, list_bytes, offset, _ = _END.unpack(end)
    if count > MAX_FILES or list_bytes > _MAX_DIRECTORY_BYTES:
        raise Damaged("its list of entries is too long")
    if offset == 0xFFFFFFFF:  # beyond 4 GB the numbers stand before: the list ends there
        record = os.pread(fd, 56, max(0, num_bytes - _END.size - 20 - 56))
        if len(record) != 56 or not record.startswith(b"PK\6\6"):
            raise Damaged("it is no archive of ours, or was cut off")
        list_bytes = int.from_bytes(record[40:48], "little")
        if list_bytes > _MAX_DIRECTORY_BYTES:
            raise Damaged("its list of entries is too long")


def _start(fd: int, entry: zipfile.ZipInfo, num_bytes: int) -> int:
    """Where the bytes of an entry begin: after a header of its own, which repeats its name."""
    header = os.pread(fd, _LOCAL.size, entry.header_offset)
    if len(header) != _LOCAL.size or not header.startswith(b"PK\3\4"):
        raise Damaged(f"{entry.filename} is not where it should be")
    name_bytes, extra_bytes = (int(number) for number in _LOCAL.unpack(header)[-2:])
    name = os.pread(fd, name_bytes, entry.header_offset + _LOCAL.size)
    start = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
    if name != entry.filename.encode() or start + entry.file_size > num_bytes:
        raise Damaged(f"{entry.filename} is not where it should be")
    return start
