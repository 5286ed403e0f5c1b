"""Pickles that hold arrays, bytes, numbers and containers of these. A file that asks for anything else is refused.

A pickle calls functions by their names. Here each name stands for an object of ours that has no attributes to change, and
what it builds is data; neither numpy nor anything else is called on behalf of a file before its claims are checked.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from typing import Any, Final

import numpy as np

_NUMBERS: Final = re.compile(r"[<>|=]?([biuf][1248])")
_ORDERS: Final = ("<", ">", "|", "=")


class Refused(pickle.UnpicklingError):
    """A pickle asks for what no data needs."""


def read_pickle(data: bytes) -> Any:
    """What a pickle holds; strings of Python 2 are read as latin-1. An exception of some kind if it is damaged."""
    return _Unpickler(io.BytesIO(data), encoding="latin1").load()


class Array:
    """An array that is being read."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, is_fortran, raw = state
        content = raw.encode("latin1") if isinstance(raw, str) else raw
        self._value = _array(content, dtype, shape, "F" if is_fortran else "C")

    @property
    def value(self) -> np.ndarray[Any, Any]:
        """The array, read-only. Refused if the pickle ended without one."""
        if self._value is None:
            raise Refused("an array without content")
        return self._value


class _Dtype:
    """The type of an array's numbers."""

    __slots__ = ("_name", "_order")

    def __init__(self, name: str) -> None:
        self._name, self._order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order not in _ORDERS:
            raise Refused(f"the byte order {order!r}")
        self._order = order

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self._name).newbyteorder(self._order)  # type: ignore[arg-type]


class _Dtypes:
    __slots__ = ()

    def __call__(self, name: object, *_flags: object) -> _Dtype:
        found = _NUMBERS.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise Refused(f"arrays of {name!r}")
        return _Dtype(found[1])


class _EmptyArrays:
    __slots__ = ()

    def __call__(self, *_kind_shape_code: object) -> Array:
        return Array()


class _ArraysOfBuffers:
    """What numpy's newest pickles call."""

    __slots__ = ()

    def __call__(self, raw: object, dtype: object, shape: object, order: object, *_axes: object) -> Array:
        array = Array()
        array.__setstate__((1, shape, dtype, order == "F", raw))
        return array


class _Scalars:
    """Single numbers of numpy's."""

    __slots__ = ()

    def __call__(self, dtype: object, raw: object) -> Any:
        content = raw.encode("latin1") if isinstance(raw, str) else raw
        return _array(content, dtype, (), "C").item()


class _Bytes:
    """How Python 3 spells bytes for Python 2."""

    __slots__ = ()

    def __call__(self, text: object, encoding: object) -> bytes:
        if encoding != "latin1" or not isinstance(text, str):
            raise Refused(f"the encoding {encoding!r}")
        return text.encode("latin1")


class _Kind:
    """A class that is named and never called."""

    __slots__ = ()


_ALLOWED: Final[dict[tuple[str, str], object]] = {
    ("numpy", "ndarray"): _Kind(),
    ("numpy", "dtype"): _Dtypes(),
    ("_codecs", "encode"): _Bytes(),
    **{
        (f"numpy.{core}.{module}", name): fake
        for core in ("core", "_core")
        for module, name, fake in (
            ("multiarray", "_reconstruct", _EmptyArrays()),
            ("multiarray", "scalar", _Scalars()),
            ("numeric", "_frombuffer", _ArraysOfBuffers()),
        )
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise Refused(f"{module}.{name}")
        return _ALLOWED[module, name]


def _array(raw: object, dtype: object, shape: object, order: str) -> np.ndarray[Any, Any]:
    if not isinstance(raw, (bytes, bytearray)) or not isinstance(dtype, _Dtype):
        raise Refused("an array whose content is no bytes")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise Refused(f"the shape {shape!r}")
    kind = dtype.numpy()
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise Refused(f"{len(raw)} bytes for an array {kind} {shape}")
    flat: np.ndarray[Any, Any] = np.frombuffer(raw, kind)
    return flat.reshape(shape, order="F" if order == "F" else "C")
