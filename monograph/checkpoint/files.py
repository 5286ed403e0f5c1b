"""Directories that hold checkpoints: opened, locked, synced, and cleared of what killed savers left.

A saver holds a shared lock on the directory it writes to, a reader on the one it reads. The system drops it when the
process dies, so a directory that can be locked exclusively has neither. A process that is stopped keeps its locks:
readers go on without one, for what they read is verified, and savers end with an error.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # no POSIX system: Monograph can be imported, checkpoints cannot be written
    fcntl = None  # type: ignore[assignment]

from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.manifest import PROGRAM_FILE, TENSOR_FILE

MANIFEST: Final = "manifest.json"
_TRIES: Final = 20
_READER_SECONDS = 1.0  # that a reader waits; who renames or lists holds the lock for milliseconds
_SAVER_SECONDS = 30.0  # that a saver waits; to remove the files of a large checkpoint takes seconds
_PAUSE_SECONDS: Final = 0.001
_UNFINISHED_MANIFEST: Final = re.compile(r"manifest-[0-9a-f]{8}\.tmp")
_OF_THE_SYSTEM: Final = re.compile(r"\.nfs[0-9a-f]+")  # a deleted file that somebody still has open
_TEMPORARY: Final = re.compile(r"\.(.+)\.tmp-[0-9a-f]{8}")


def new_token() -> str:
    """Eight hex digits that nobody else uses."""
    return secrets.token_hex(4)


def unfinished_manifest() -> str:
    """A name for the manifest that will replace the old one."""
    return f"manifest-{new_token()}.tmp"


def is_ours(name: str) -> bool:
    """True for the files that a saver makes."""
    patterns = (TENSOR_FILE, PROGRAM_FILE, _UNFINISHED_MANIFEST)
    return name == MANIFEST or any(pattern.fullmatch(name) for pattern in patterns)


def foreign_files(fd: int) -> list[str]:
    """What is neither a saver's nor of the system; a killed saver's files are no harm."""
    return [name for name in directory_files(fd) if not is_ours(name)]


def directory_files(fd: int) -> list[str]:
    """The names in a directory, without those that a file system makes for itself."""
    return [name for name in os.listdir(fd) if not _OF_THE_SYSTEM.fullmatch(name)]


def temporary_for(path: Path) -> Path:
    """A new name beside `path`, for what is not complete yet or no longer needed."""
    return path.with_name(f".{path.name}.tmp-{new_token()}")


@contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """A name beside `path` for a new file, which then takes its place: the old one or the new one is there at any moment."""
    temporary = temporary_for(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The directory as a file descriptor: its files stay the same ones even if `path` is given to another."""
    fd = _directory(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _directory(path: Path) -> int:
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "checkpoints need a POSIX system", str(path))
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


@contextmanager
def opened_to_read(path: Path) -> Iterator[int]:
    """The directory, marked as one that is being read: while it is, no manager removes it."""
    fd = open_to_read(path)
    try:
        yield fd
    finally:
        os.close(fd)


def open_to_read(path: Path) -> int:
    """The directory that has this path now, marked as one that is being read; the caller closes it."""
    for _ in range(_TRIES):
        fd = _directory(path)
        try:
            _share(fd, _READER_SECONDS)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was removed before it was locked, and another took its place
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))


@contextmanager
def opened_to_write(path: Path) -> Iterator[int]:
    """The directory, marked as one that is being written to."""
    fd = _open_to_write(path, _SAVER_SECONDS)
    try:
        yield fd
    finally:
        os.close(fd)


def new_directory(path: Path) -> tuple[Path, int]:
    """A temporary directory beside `path`, opened to write; the caller closes it."""
    for _ in range(_TRIES):
        temporary = temporary_for(path)
        temporary.mkdir()
        try:
            return temporary, _open_to_write(temporary, 0)
        except (FileNotFoundError, Refused):
            continue  # another saver took it for abandoned before it was locked
        except BaseException:
            with suppress(OSError):
                temporary.rmdir()
            raise
    raise FileNotFoundError(errno.ENOENT, "new directories disappear", str(path.parent))


def _open_to_write(path: Path, seconds: float) -> int:
    fd = _directory(path)
    try:
        if not _share(fd, seconds):
            raise Refused(
                f"another process has kept it to itself for {seconds:.0f} seconds: it was stopped while it saved there",
                "end that process or let it go on (kill -CONT), or use another path",
            )
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was removed by another process", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def alone(fd: int) -> bool:
    """True if no other saves to or reads the directory, and none begins to until it is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # or the file system has no locks: then nothing of others is ever removed
        return False
    return True


def in_use(fd: int) -> bool:
    """True if another is known to save to or to read the directory; if not, none begins to until it is closed.

    Where a file system has no locks nobody is known of.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def new_file(name: str, directory: int) -> Iterator[int]:
    """A file that did not exist; on the disk when this ends well."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=directory)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def open_entry(name: str, directory: int) -> Iterator[tuple[int, int]]:
    """A plain file of the directory, and its size; links, pipes and devices are `Damaged` and never followed."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{name} is a symbolic link") from None
        if error.errno == errno.ENOENT:
            raise Damaged(f"it has no {name}") from None
        raise Damaged(f"{name} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{name} is no plain file")
        yield fd, status.st_size
    finally:
        os.close(fd)


def sync(fd: int) -> None:
    """Bring the names in a directory to the disk, on file systems that can."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def remove_files(fd: int, names: list[str]) -> None:
    """Remove what is there of these names."""
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)


def remove_checkpoint(path: Path) -> None:
    """Remove a directory with the files that a saver makes; one that holds anything else stays."""
    with opened(path) as fd:
        names = list(filter(is_ours, os.listdir(fd)))
        remove_files(fd, sorted(names, key=lambda name: name != MANIFEST))
    os.rmdir(path)


def remove_abandoned(parent: Path, name: re.Pattern[str]) -> None:
    """Remove the temporary directories that dead savers left for paths whose name matches."""
    for entry in os.listdir(parent):
        found = _TEMPORARY.fullmatch(entry)
        if found is None or name.fullmatch(found[1]) is None:
            continue
        # errors: somebody else removes it too, or put a file of theirs there
        with suppress(OSError), opened(parent / entry) as fd:
            if alone(fd):  # until it is gone: nobody begins to write to it
                remove_checkpoint(parent / entry)


def unlock(fd: int) -> None:
    """Drop the lock, also that of a forked process that has the directory open still."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def _share(fd: int, seconds: float) -> bool:
    """Mark a directory as one that is used; False if another process keeps it to itself for so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return True  # the file system has no locks
        else:
            return True
