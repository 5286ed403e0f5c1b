"""Numbers to the last bit: what tells them apart, and how Python source says them."""

from __future__ import annotations

import math
import struct


def bits(number: complex) -> bytes:
    """What tells zeros and NaNs apart that compare or print as one: the bytes of the real and the imaginary part."""
    return struct.pack("dd", number.real, number.imag)


def of_bits(kind: type, raw: bytes) -> float | complex:
    """The number of a kind, float or complex, that has these `bits`."""
    real, imag = struct.unpack("dd", raw)
    return complex(real, imag) if kind is complex else real


def exactly(value: object) -> object:
    """Equal for two values of one exact type that nothing tells apart, in tuples too: not for `1` and `True`.

    Values of other types are compared as they say themselves.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return kind, bits(value)  # type: ignore[arg-type]
    if kind is tuple or kind is frozenset:
        return kind, tuple(map(exactly, value))  # type: ignore[call-overload]
    return kind, value


def spell_number(number: complex) -> str:
    """A number as Python source that gives its very bits: of infinities too, and the signs of zeros and NaNs."""
    if isinstance(number, complex):
        return f"complex({spell_number(number.real)}, {spell_number(number.imag)})"
    if math.isnan(number) and math.copysign(1.0, number) < 0:
        return 'float("-nan")'
    return repr(number) if math.isfinite(number) else f'float("{number}")'
