"""Where compiled code is kept on disk, and whether that place can be trusted: it is loaded and run.

A directory is used if it can be made, and if nobody else could have put something there. Where the one that is asked for
cannot be used, a private one in the system's directory for temporary files takes its place, with a warning.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOGGER = logging.getLogger("monograph")

ADVICE: Final = "set MONOGRAPH_CACHE_DIR to a directory of your own with room for compiled code"
LEAST_BYTES: Final = 32 << 20  # that must be free where code is compiled
_LEAST_FILES: Final = 100
_PARTS: Final = ("steps", "kernels", "shared", "torch")
TORCHS: Final = "TORCHINDUCTOR_CACHE_DIR"
_SPLIT: Final = re.compile(r"[\s'\"\\]")  # where a command of torch's compiler falls apart
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS: Final = (*map(os.strerror, _FULL), "File size limit exceeded")

# Documented cache: what this process has been warned of already.
_TOLD: set[str] = set()


@dataclass(frozen=True)
class CacheDirectories:
    """Where compiled code is looked for, in this order, and where new code goes, which may be nowhere."""

    read: tuple[Path, ...]
    write: Path | None
    problem: str = ""  # why the one that was asked for is not the one where new code goes


def asked_for() -> Path | None:
    """MONOGRAPH_CACHE_DIR, or the user's cache directory; None for a user without a home."""
    if chosen := os.environ.get("MONOGRAPH_CACHE_DIR"):
        return Path(chosen).absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "monograph"
    try:
        return Path.home() / ".cache" / "monograph"
    except RuntimeError:
        return None


def cache_directories() -> CacheDirectories:
    """The directories as they are now. Where new code does not go where it was asked to, a warning says so once."""
    asked = asked_for()
    unusable = "there is no home directory" if asked is None else distrust_of(asked) or runs_no_code(asked)
    problem = unusable or ("" if asked is None else _why_nothing_is_kept(asked))
    if asked is not None and not problem:
        return CacheDirectories((asked,), asked)
    private = private_directory()
    read = tuple(path for path in (None if unusable else asked, private) if path is not None)
    if private is not None:
        _tell(
            f"compiled code cannot be kept where it was asked to be: {problem}; it is kept in {private}. "
            f"To change that, {ADVICE}"
        )
    return CacheDirectories(read, private, problem)


def distrust_of(path: Path) -> str:
    """Why nothing in a directory may be loaded; "" if it may, or if it is not there yet."""
    for directory in (path, *(path / name for name in _PARTS)):
        try:
            status = directory.stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # it cannot be read: nothing will be loaded
        except OSError as error:
            return f"{directory} cannot be looked at: {error.strerror}"
        if not stat.S_ISDIR(status.st_mode) and directory == path:
            return f"{directory} is no directory"
        if reason := _others_may_change(status):
            return f"{directory} {reason}, and what is there would be run"
    return ""


def is_private(path: Path) -> bool:
    """True for a file or directory that nobody else can have changed."""
    try:
        return not _others_may_change(path.stat())
    except OSError:
        return False


def _others_may_change(status: os.stat_result) -> str:
    if not hasattr(os, "geteuid"):
        return ""  # no POSIX system
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        return f"belongs to another user ({status.st_uid})"
    own_group = status.st_gid == status.st_uid  # as systems do it that give each user a group
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not own_group):
        return "may be written to by other users"
    return ""


def why_not_writable(path: Path) -> str:
    """Why no new code can be kept in a directory, which is made if it is missing; "" if it can."""
    if os.name == "posix" and _SPLIT.search(str(path)):
        return f"torch's compiler takes no spaces, quotes and backslashes in the name {str(path)!r}"
    try:
        _make(path)
        if not os.access(path, os.W_OK | os.X_OK):
            return f"{path} cannot be written to"
        if (free := shutil.disk_usage(path).free) < LEAST_BYTES:
            return f"the disk of {path} is full ({free / 2**20:.0f} MiB are free)"
        if hasattr(os, "statvfs") and (status := os.statvfs(path)).f_files and status.f_favail < _LEAST_FILES:
            return f"the disk of {path} is full (it has room for {status.f_favail} files)"
        return runs_no_code(path)
    except OSError as error:
        return f"{path} cannot be made: {error.strerror}"


def _why_nothing_is_kept(cache: Path) -> str:
    """Why nothing new can be kept in a cache, or in a part of it that is there."""
    parts = [path for name in _PARTS if os.path.lexists(path := cache / name)]
    return next(filter(None, map(why_not_writable, (cache, *parts))), "")


def without_any_place() -> bool:
    """True if there is no directory for compiled code, nor one for temporary files."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return cache_directories().write is None
    return False


def runs_no_code(path: Path) -> str:
    """Why code in a directory, there or not yet, cannot be loaded: its disk is mounted so; "" if it can."""
    there = next(item for item in (path, *path.parents, Path("/")) if os.path.exists(item))
    try:
        flags = os.statvfs(there).f_flag if hasattr(os, "statvfs") else 0
    except OSError:
        return ""
    return f"the disk of {path} lets no code run (noexec)" if flags & getattr(os, "ST_NOEXEC", 0) else ""


def _make(path: Path) -> None:
    """Like `mkdir -p`; what is new is its user's alone."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


def private_directory() -> Path | None:
    """A directory of this user alone among the temporary files, the same for later processes; None if none can be."""
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None
    path = base / f"monograph-{os.geteuid() if hasattr(os, 'geteuid') else 'cache'}"
    if path.is_symlink() or distrust_of(path) or _why_nothing_is_kept(path):
        return None
    return path


@contextmanager
def room_for_torch(default: Callable[[], str]) -> Iterator[None]:
    """While the block runs, temporary files and those of torch's compiler are where there is room and code can run.

    Where its own directory, `default`, cannot be used, it gets a part of ours for the life of this process. So do
    temporary files, those of the C++ compiler too, while the block runs, or as long if there is no directory for them.
    """
    write = cache_directories().write
    if write is None:
        yield
        return
    ours = write / "torch"
    with _temporary_files_in(ours):
        theirs = Path(os.environ.get(TORCHS) or default())
        distrust = distrust_of(theirs)
        if distrust or why_not_writable(theirs):
            ours.mkdir(mode=0o700, exist_ok=True)
            os.environ[TORCHS] = str(ours)
            if distrust:
                _tell(f"{distrust}: torch's compiler keeps its files in {ours} instead")
        yield


@contextmanager
def _temporary_files_in(ours: Path) -> Iterator[None]:
    """Where the usual directory for temporary files has no room, or lets no code run, ours takes its place."""
    try:
        before = tempfile.gettempdir()
    except FileNotFoundError:
        ours.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(ours)
        before = str(ours)
    if not why_not_writable(Path(before)):
        yield
        return
    ours.mkdir(mode=0o700, exist_ok=True)
    variable = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(ours)
    try:
        yield
    finally:
        tempfile.tempdir = before
        os.environ.pop("TMPDIR")
        if variable is not None:
            os.environ["TMPDIR"] = variable


def out_of_room(error: BaseException | None) -> bool:
    """True if an error, or what it depends on, is that of a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(words in str(error) for words in _FULL_WORDS):  # of the C++ compiler
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


def _tell(text: str) -> None:
    if text not in _TOLD:
        _TOLD.add(text)
        LOGGER.warning("%s", text)
