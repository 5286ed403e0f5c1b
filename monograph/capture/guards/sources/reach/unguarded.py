"""Functions whose results move without anything that could be looked at: the clock, files, the keyboard."""

from __future__ import annotations

import builtins
import datetime
import dis
import os
import random
import time
import uuid
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from monograph.capture.guards.sources.attributes import isinstance_of
from monograph.capture.guards.sources.code_names import CodeNames
from monograph.user_code.files import is_installed_file
from monograph.user_code.lines import Origin

_UNGUARDED = {
    id(item): name
    for name, item in (
        ("the clock", time.time), ("the clock", time.time_ns), ("the clock", time.monotonic),
        ("the clock", time.perf_counter), ("the clock", time.process_time), ("the clock", datetime.datetime),
        ("a file", open), ("a file", os.stat), ("a file", os.path.exists), ("a file", os.path.isfile),
        ("a file", os.path.isdir), ("a file", os.listdir), ("the working directory", os.getcwd),
        ("the keyboard", input), ("random bytes of the system", os.urandom),
        ("random bytes of the system", random.SystemRandom), ("random bytes of the system", uuid.uuid4),
    )
}  # fmt: skip


def unguarded_in(code: CodeType, table: dict[str, Any], names: CodeNames) -> Iterator[tuple[str, Origin]]:
    """What code of the user's asks for that moves unseen, with the line. `table` has its globals."""
    if is_installed_file(code.co_filename):
        return
    for name in names.globals:
        found = table.get(name, getattr(builtins, name, None))
        inside = vars(found) if isinstance_of(found, ModuleType) else {}
        for item, spelled in [(found, name), *((inside.get(n), n) for n in names.attributes if n in inside)]:
            if id(item) in _UNGUARDED:
                yield _UNGUARDED[id(item)], Origin(file=code.co_filename, line=_line_of(code, spelled))


def _line_of(code: CodeType, name: str) -> int:
    """The first line of code that spells a name."""
    lines = (
        item.positions.lineno for item in dis.get_instructions(code) if item.argval == name and item.positions
    )
    return next(lines, 0) or code.co_firstlineno
