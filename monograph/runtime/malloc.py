"""Memory that a step frees and the next step needs again: the C library is asked to keep it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # the C library takes no larger one
_LARGEST_TRIM_THRESHOLD = 2**31 - 1
_OFF = ("MONOGRAPH_RETURN_MEMORY", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@dataclass
class _Kept:
    """How many bytes the process keeps: the largest that was asked for."""

    nbytes: int = 0


_KEPT = _Kept()


def keep_freed_memory(nbytes: int) -> bool:
    """Let the process keep up to `nbytes` that were freed, rather than give each large block back and ask for it again.

    A page that is given back costs a fault when it is used again: a fifth of the time of a MobileNetV2 step. It holds
    for the whole process, for the largest `nbytes` so far; the most memory that it needs stays the same. Nothing is done
    if MONOGRAPH_RETURN_MEMORY is set, or if the environment sets malloc's own thresholds, or without glibc. Gives True
    if the process keeps that much.
    """
    if any(os.environ.get(name) for name in _OFF):
        return False
    if nbytes <= _KEPT.nbytes:
        return True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_TRIM_THRESHOLD, min(nbytes, _LARGEST_TRIM_THRESHOLD))
    kept = kept and mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    _KEPT.nbytes = nbytes if kept else _KEPT.nbytes
    return bool(kept)
