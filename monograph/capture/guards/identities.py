"""Which objects a list holds, as bytes that are compared at the speed of memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

_ITEMS = tuple.__basicsize__  # where CPython keeps the addresses of a tuple's items


def _from_memory(items: Sequence[Any]) -> bytes:
    held = tuple(items)
    return ctypes.string_at(id(held) + _ITEMS, struct.calcsize("P") * len(held))


def _from_ids(items: Sequence[Any]) -> bytes:
    return struct.pack(f"{len(items)}P", *map(id, items))


def _fastest() -> Callable[[Sequence[Any]], bytes]:
    known = (object(), object(), None)
    return _from_memory if _from_memory(known) == _from_ids(known) else _from_ids


identities = _fastest()
"""The addresses of objects: the same for two lists of the very same objects, as long as these are alive.

`==` of two lists would go on past objects that are equal but not the same, as tensors of one element can be.
"""
