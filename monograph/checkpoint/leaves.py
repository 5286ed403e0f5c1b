"""The leaves of a state that need nothing but themselves: how each is written in JSON, and read again.

None, bool, str, an int of 64 bits and a finite float are themselves in JSON; the others are an object with one key,
their kind.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

from monograph.checkpoint.errors import Damaged

Json: TypeAlias = Any

MAX_INT: Final = (1 << 63) - 1

_DEVICE: Final = re.compile(r"[a-z]{1,32}(:[0-9]{1,9})?")
_HEX: Final = re.compile(r"([0-9a-f]{2})*")
# looked up here and not by getattr, which imports a module for some names
_DTYPES: Final = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_INT: Final = re.compile(r"-?0x[0-9a-f]+")


# --- what to expect of JSON ------------------------------------------------------------------------------------


def check(holds: bool, reason: str) -> None:
    """`Damaged` with a reason unless it holds."""
    if not holds:
        raise Damaged(reason)


def typed(value: Json, kind: type) -> Any:
    """The value, which must be of this very type."""
    check(type(value) is kind, f"the tree has a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def list_of(value: Json, length: int | None = None) -> list[Json]:
    """The value, which must be a list, of so many items if given."""
    items: list[Json] = typed(value, list)
    check(length is None or len(items) == length, "the tree has a list of a wrong length")
    return items


def matching(value: Json, pattern: re.Pattern[str]) -> str:
    """The value, which must be a text that matches as a whole."""
    text: str = typed(value, str)
    check(pattern.fullmatch(text) is not None, f"the tree has {text[:40]!r} where another text belongs")
    return text


def bits(value: Json, length: int | None = None) -> bytes:
    """The bytes that hex digits stand for, so many of them if given."""
    data = bytes.fromhex(matching(value, _HEX))
    check(length is None or len(data) == length, "the tree has bits of a wrong number")
    return data


# --- to JSON ---------------------------------------------------------------------------------------------------


def _int_to_json(value: int) -> Json:
    return value if -MAX_INT <= value <= MAX_INT else {"int": hex(value)}


def _float_to_json(value: float) -> Json:
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _complex_to_json(value: complex) -> Json:
    return {"complex": struct.pack(">dd", value.real, value.imag).hex()}


def _str_to_json(value: str) -> Json:
    return value if is_text(value) else {"str": value.encode("utf-8", "surrogatepass").hex()}


def is_text(value: str) -> bool:
    """False for strings with halves of UTF-16 pairs, which JSON might join."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bytes_to_json(value: bytes) -> Json:
    return {"bytes": base64.b64encode(value).decode()}


def _size_to_json(value: torch.Size) -> Json:
    return {"size": list(value)}


def _named_to_json(value: object) -> Json:
    """A dtype or a device, by the name that torch prints."""
    return {type(value).__name__: str(value).removeprefix("torch.")}


# --- and back --------------------------------------------------------------------------------------------------


def _dtype_from(payload: Json) -> torch.dtype:
    dtype = _DTYPES.get(typed(payload, str))
    if dtype is None:
        raise Damaged(f"the tree has the unknown dtype {payload!r}")
    return dtype


def _device_from(payload: Json) -> torch.device:
    try:
        return torch.device(matching(payload, _DEVICE))
    except RuntimeError:
        raise Damaged(f"the tree has the unknown device {payload!r}") from None


def _str_from(payload: Json) -> str:
    try:
        return bits(payload).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Damaged("the tree has bytes that are no text") from None


def _bytes_from(payload: Json) -> bytes:
    try:
        return base64.b64decode(typed(payload, str), validate=True)
    except ValueError:
        raise Damaged("the tree has bytes that are not base64") from None


def _size_from(payload: Json) -> torch.Size:
    numbers = list_of(payload)
    check(
        all(type(number) is int and -MAX_INT <= number <= MAX_INT for number in numbers),
        "the tree has a wrong shape",
    )
    return torch.Size(numbers)


LEAVES_TO_JSON: Final[Mapping[type, Callable[[Any], Json]]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _int_to_json,
    float: _float_to_json,
    complex: _complex_to_json,
    str: _str_to_json,
    bytes: _bytes_to_json,
    torch.Size: _size_to_json,
    torch.dtype: _named_to_json,
    torch.device: _named_to_json,
}

LEAVES_FROM_JSON: Final[Mapping[str, Callable[[Json], Any]]] = {
    "int": lambda payload: int(matching(payload, _INT), 16),
    "float": lambda payload: struct.unpack(">d", bits(payload, 8))[0],
    "complex": lambda payload: complex(*struct.unpack(">dd", bits(payload, 16))),
    "str": _str_from,
    "bytes": _bytes_from,
    "size": _size_from,
    "dtype": _dtype_from,
    "device": _device_from,
}
