"""The tensors of a compiled step in one piece of memory, in which each has its place: `arena.h`.

A heap leaves gaps between blocks: a step needs up to twice what its tensors hold. And to give blocks back to the system and ask
for them again costs a fifth of the time of a step of MobileNetV2.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from monograph.compat.inductor.building.with_torch import compile_with_torch
from monograph.compat.inductor.codegen import IN_ONE_PIECE
from monograph.compat.inductor.disk_cache import shared_entry
from monograph.errors import BackendError

LOGGER = logging.getLogger("monograph")

_OFF: Final = "MONOGRAPH_RETURN_MEMORY"


def hold_in_one_piece(library: Path) -> bool:
    """Let a compiled step on the CPU hold its tensors in one piece of memory from its second run on.

    The process keeps the piece for the next step; it is as large as the largest step needs. A step that runs while another does
    gets memory from the heap, and so does one that takes other sizes than before. Gives False, and does nothing, if
    MONOGRAPH_RETURN_MEMORY is set, where there is no compiler, and on systems without glibc.
    """
    code = _code_here()
    if code is None:
        return False
    use = getattr(ctypes.CDLL(str(library)), IN_ONE_PIECE, None)
    if use is None:
        return False
    begin, end = (
        ctypes.cast(getattr(code, f"monograph_{name}"), ctypes.c_void_p) for name in ("begin", "end")
    )
    use(begin, end, ctypes.c_void_p(code.monograph_new_steps()))
    return True


def give_back() -> None:
    """Give the piece back to the system, until the next step: it is empty between two steps."""
    code = _code() if _code.cache_info().currsize else None
    if code is not None:
        code.monograph_give_back()


def most_allocated(run: Callable[[], object], *, everywhere: bool = False) -> int | None:
    """The most bytes of blocks at once that this thread, or all of them, take from torch's allocator while `run` runs.

    None where that is not known: without `arena.h`, or while another thread counts.
    """
    code = _code_here()
    if code is None or not code.monograph_begin_count(ctypes.c_bool(everywhere)):
        return None
    try:
        run()
    finally:
        most = int(code.monograph_end_count())
    return most


def _code_here() -> Any:
    has_glibc = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")
    return _code() if has_glibc and not os.environ.get(_OFF) else None


@cache
def _code() -> Any:
    """The library, which torch asks for memory from now on; None where there is none."""
    text = Path(__file__).with_name("arena.h").read_text()
    try:
        entry = shared_entry(text, "arena.so")
        if not entry.is_whole():
            with entry.written() as goal:
                compile_with_torch(text, goal)
        code = ctypes.CDLL(str(entry.library))
    except (BackendError, OSError, subprocess.CalledProcessError) as error:
        LOGGER.info("compiled steps take their memory from the heap: %s", error)
        return None
    code.monograph_new_steps.restype = ctypes.c_void_p
    code.monograph_begin.restype = ctypes.c_bool
    code.monograph_begin.argtypes = [ctypes.c_void_p]
    code.monograph_end.argtypes = [ctypes.c_bool]
    code.monograph_begin_count.restype = ctypes.c_bool
    code.monograph_end_count.restype = ctypes.c_size_t
    code.monograph_install()
    return code
