"""The interface to numpy's C code, which guards borrow to look at many addresses in one call."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

WORD = ctypes.sizeof(ctypes.c_void_p)
_CALL_EACH = (
    12  # the place of PyUFunc_O_O in the table that numpy gives to extensions, part of its stable ABI
)


def words_at(addresses: Sequence[int]) -> Callable[[], Any]:
    """What reads a word of memory at each of these addresses, into a new array. They must stay readable."""
    if not addresses:
        return lambda: np.empty(0, dtype=np.int64)
    first = min(addresses)
    interface = {
        "data": (first, True),
        "shape": ((max(addresses) - first) // WORD + 1,),
        "typestr": np.dtype(np.int64).str,
        "version": 3,
    }
    memory = np.asarray(SimpleNamespace(__array_interface__=interface))
    places = (np.array(addresses, dtype=np.int64) - first) // WORD
    return partial(memory.take, places)  # all of C


def calls_of_each(function: int, objects: Sequence[Any]) -> Callable[[], bytes] | None:
    """What calls a C function `void* (*)(PyObject*)` with each object, and gives all results; None if numpy has no such
    loop. It ends at the first result that is null, and leaves those after it null. The objects must stay alive.
    """
    loop = _loop_over_objects()
    if loop is None:
        return None
    array, pair = ctypes.c_void_p * len(objects), ctypes.c_void_p * 2
    held = array(*map(id, objects))
    count, steps = (ctypes.c_ssize_t * 1)(len(objects)), (ctypes.c_ssize_t * 2)(WORD, WORD)
    address = ctypes.addressof

    def run() -> bytes:
        results = array()  # all null, and of this call: what is there is taken for objects to release
        loop(pair(address(held), address(results)), count, steps, function)
        return bytes(results)

    return run


def _loop_over_objects() -> Callable[..., Any] | None:
    """numpy's loop that calls a C function for each object of an array, without Python between."""
    try:
        capsule = importlib.import_module("numpy._core._multiarray_umath")._UFUNC_API
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        table = ctypes.cast(get(capsule, None), ctypes.POINTER(ctypes.c_void_p))
        prototype = ctypes.PYFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        )
        return prototype(table[_CALL_EACH] or 0)
    except (ImportError, AttributeError, ValueError, TypeError):
        return None
