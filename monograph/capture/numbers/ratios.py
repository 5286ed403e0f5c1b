"""Whole numbers that Python makes of a part of a size: `math.ceil(size / 2)`, `math.floor(size * 1.5)`."""

from __future__ import annotations

import operator
from typing import Any

from monograph.capture.numbers.moving import expression_of, is_moving

_EXACT = 10  # bits of a factor: with it sizes of up to 43 bits are exact as floats


def floor(number: Any) -> Any:
    """The largest whole number that is not larger, computed from the size in whole numbers.

    None where these might give another one than floats do.
    """
    parts = _parts(number)
    return None if parts is None else parts[0] * parts[1] // parts[2]


def ceil(number: Any) -> Any:
    """The smallest whole number that is not smaller, in the same way."""
    parts = _parts(number)
    return None if parts is None else -(-(parts[0] * parts[1]) // parts[2])


def _parts(number: Any) -> tuple[Any, int, int] | None:
    """A size, by what it is multiplied, and by what that is divided."""
    node = number.node
    if node.target not in (operator.mul, operator.truediv):
        return None
    size, by = node.operands
    if node.target is operator.mul and not is_moving(size):
        size, by = by, size
    expression = expression_of(size) if is_moving(size) else None
    if (
        expression is None
        or (expression.least or 0) < 1
        or type(by) not in (int, float)
        or not 0 < by < 2**31
    ):
        return None
    above, below = by.as_integer_ratio()
    if node.target is operator.truediv:
        return (size, 1, above) if below == 1 else None
    return (size, above, below) if above.bit_length() <= _EXACT else None
