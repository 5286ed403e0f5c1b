"""Functions whose results move without anything that could be looked at: the clock, files, processes, frames, the keyboard."""

from __future__ import annotations

import builtins
import datetime
import dis
import glob
import inspect
import os
import pathlib
import random
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from monograph.capture.guards.sources.attributes import isinstance_of
from monograph.capture.guards.sources.code_names import CodeNames
from monograph.user_code.files import is_installed_file, is_user_file
from monograph.user_code.lines import Origin

_UNGUARDED = {
    id(item): name
    for name, item in (
        ("the clock", time.time), ("the clock", time.time_ns), ("the clock", time.monotonic),
        ("the clock", time.perf_counter), ("the clock", time.process_time), ("the clock", datetime.datetime),
        ("the clock", time.monotonic_ns), ("the clock", time.perf_counter_ns), ("the clock", time.localtime),
        ("the clock", time.gmtime), ("the clock", time.ctime), ("the clock", time.strftime), ("the clock", datetime.date),
        ("a file", open), ("a file", os.open), ("a file", os.stat), ("a file", os.lstat), ("a file", os.access),
        ("a file", os.path.exists), ("a file", os.path.lexists), ("a file", os.path.isfile), ("a file", os.path.isdir),
        ("a file", os.path.islink), ("a file", os.path.getsize), ("a file", os.path.getmtime), ("a file", os.listdir),
        ("a file", os.scandir), ("a file", os.walk), ("a file", glob.glob), ("a file", glob.iglob),
        ("a file", shutil.disk_usage), ("a file", shutil.which), ("the working directory", os.getcwd),
        ("another process", subprocess.run), ("another process", subprocess.Popen),
        ("another process", subprocess.check_output), ("another process", subprocess.call),
        ("another process", subprocess.getoutput), ("another process", os.system), ("another process", os.popen),
        ("another process", os.kill), ("another process", os.getloadavg),
        ("random bytes of the system", secrets.token_bytes), ("random bytes of the system", secrets.randbelow),
        ("the keyboard", input), ("random bytes of the system", os.urandom),
        ("random bytes of the system", random.SystemRandom), ("random bytes of the system", uuid.uuid4),
        ("the frames of callers", sys._getframe), ("the frames of callers", inspect.currentframe),
        ("the frames of callers", inspect.stack), ("the handler of a signal", signal.getsignal),
        ("the thread", threading.current_thread),
    )
}  # fmt: skip


_OF_PATHS = (
    "stat", "lstat", "exists", "is_file", "is_dir", "is_symlink", "iterdir", "glob", "rglob", "open", "read_text",
    "read_bytes", "cwd",
)  # fmt: skip
# methods of paths, which the code that calls them knows by no global
_CODES = {
    id(code): code
    for name in _OF_PATHS
    if (code := getattr(getattr(pathlib.Path, name), "__code__", None)) is not None
}


def asks_of_paths(code: CodeType, caller: CodeType | None) -> bool:
    """True for a method of `pathlib.Path` that asks for a file, called by code of the user's."""
    return id(code) in _CODES and caller is not None and is_user_file(caller.co_filename)


def unguarded_in(code: CodeType, table: dict[str, Any], names: CodeNames) -> Iterator[tuple[str, Origin]]:
    """What code of the user's asks for that moves unseen, with the line. `table` has its globals."""
    if is_installed_file(code.co_filename):
        return
    for name in names.globals:
        found = table.get(name, getattr(builtins, name, None))
        for item, spelled in _spelled(found, name, names):
            if id(item) in _UNGUARDED:
                yield _UNGUARDED[id(item)], Origin(file=code.co_filename, line=_line_of(code, spelled))


def _spelled(found: Any, name: str, names: CodeNames) -> Iterator[tuple[Any, str]]:
    """A global, and what code that spells these names may ask it for, if it is a module: `os.path.exists` as `os.stat`."""
    pending, seen = [(found, name)], set[int]()
    while pending:
        item, spelled = pending.pop()
        yield item, spelled
        if isinstance_of(item, ModuleType) and id(item) not in seen:
            seen.add(id(item))
            inside = vars(item)
            pending += [(inside[each], each) for each in names.attributes if each in inside]


def _line_of(code: CodeType, name: str) -> int:
    """The first line of code that spells a name."""
    lines = (
        item.positions.lineno for item in dis.get_instructions(code) if item.argval == name and item.positions
    )
    return next(lines, 0) or code.co_firstlineno
