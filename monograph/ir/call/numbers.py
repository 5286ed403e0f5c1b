"""Numbers to the last bit: what distinguishes them, and how Python source says them."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Hashable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import attrgetter
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID

import torch

from monograph.compat.global_state import Itself


def bits(number: complex) -> bytes:
    """What tells zeros and NaNs apart that compare or print as one: the bytes of the real and the imaginary part."""
    return struct.pack("dd", number.real, number.imag)


def of_bits(kind: type, raw: bytes) -> float | complex:
    """The number of a kind, float or complex, that has these `bits`."""
    real, imag = struct.unpack("dd", raw)
    return complex(real, imag) if kind is complex else real


# equal ones of one of these types cannot be told apart
_TOLD_BY_VALUE = frozenset(
    {
        type(None),
        bool,
        int,
        str,
        bytes,
        type(Ellipsis),
        Fraction,
        date,
        timedelta,
        UUID,
        PosixPath,
        PurePosixPath,
        torch.device,
    }
)
_SHOWS: dict[type, Callable[[Any], Any]] = {  # what tells equal ones of these types apart
    range: attrgetter("start", "stop", "step"),
    Decimal: Decimal.as_tuple,
    datetime: lambda item: (str(item), item.fold, Itself(item.tzinfo)),
    time: lambda item: (str(item), item.fold, Itself(item.tzinfo)),
}


def exactly(value: object) -> Hashable:
    """What is equal only for values of one type that nothing tells apart: not for `1` and `True`, `0.0` and `-0.0`.

    Tuples and frozen dataclasses are looked into. Objects of other types are equal to themselves alone.
    """
    kind = type(value)
    if kind is float:
        return kind, bits(value)  # type: ignore[arg-type]
    if kind in _TOLD_BY_VALUE or is_plain_subclass(value):
        return kind, value
    if isinstance(value, (float, complex)) and not hasattr(value, "__dict__"):
        return kind, bits(value)
    if kind in _SHOWS:
        return kind, _SHOWS[kind](value)
    if isinstance(value, tuple) and not getattr(value, "__dict__", None):
        return kind, tuple(map(exactly, tuple.__iter__(value)))
    if kind is frozenset:
        return kind, tuple(map(exactly, value))  # type: ignore[call-overload]
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return kind, tuple(exactly(getattr(value, field.name)) for field in dataclasses.fields(kind))
    return Itself(value)


def is_plain_subclass(value: object) -> bool:
    """True for a text or a number of a subclass that adds nothing to it which could differ."""
    kind = type(value)
    base = next((base for base in (int, str, bytes) if isinstance(value, base)), None)
    own_way = kind.__module__ != "numpy" and base is not None
    return (
        base is not None
        and not (own_way and (kind.__eq__ is not base.__eq__ or kind.__hash__ is not base.__hash__))
        and not isinstance(value, Enum)
        and not getattr(value, "__dict__", None)
    )


def spell_number(number: complex) -> str:
    """A number as Python source that gives its very bits: of infinities too, and the signs of zeros and NaNs."""
    if isinstance(number, complex):
        return f"complex({spell_number(number.real)}, {spell_number(number.imag)})"
    if math.isnan(number) and math.copysign(1.0, number) < 0:
        return 'float("-nan")'
    return repr(number) if math.isfinite(number) else f'float("{number}")'
