"""Formulas of ops that give the numbers of eager's kernels, in the place of Inductor's.

Each takes Inductor's own formula first, for what it leaves to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
Formula = Callable[..., Any]
HALF = (torch.bfloat16, torch.float16)
_SMALL = (torch.int8, torch.uint8, torch.int16)


def _computed_wide(formula: Formula, *, round_numbers: bool = False) -> Formula:
    """The formula on numbers of half types in float32, rounded once, as eager's kernels do.

    With `round_numbers` what is no tensor is rounded to the half type before.
    """

    def compute(theirs: Formula, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.result_type(*args[:2])
        for item in args[2:]:
            dtype = torch.promote_types(dtype, item.dtype)
        if not dtype.is_floating_point:
            return theirs(*args, **kwargs)
        wide = torch.float32 if dtype in HALF else dtype
        if round_numbers:
            args = tuple(
                item if isinstance(item, torch.Tensor) else rounded_number(item, dtype) for item in args
            )
        given = [item.to(wide) if isinstance(item, torch.Tensor) else item for item in args]
        return formula(*given, **kwargs).to(dtype)

    return compute


def rounded_number(number: Any, dtype: torch.dtype) -> Any:
    """A number as one of a half type."""
    is_plain = isinstance(number, float) and dtype in HALF
    return torch.tensor(number, dtype=dtype).item() if is_plain else number


def _remainder(a: Any, b: Any) -> Any:
    """`a - floor(a / b) * b` is NaN for an infinite `b`."""
    a, b = _tensors(a, b)
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def _floor_quotient(a: Any, b: Any) -> Any:
    """`floor(a / b)` rounds twice, and to the wrong side for quotients that are almost whole."""
    a, b = _tensors(a, b)
    exact = a / b
    rest = torch.fmod(a, b)
    whole = (torch.where((exact.abs() == math.inf) & (a.abs() != math.inf), a, a - rest)) / b
    whole = torch.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
    floor = whole.floor()
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole == 0, torch.copysign(torch.zeros_like(floor), exact), floor)
    return torch.where(b == 0, exact, floor)


def _quotient(theirs: Formula, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """Quotients of integers towards 0 come from those towards negative infinity, which report divisors that are 0.

    In C++, a division by 0 would end the process, and so would that of the least number by -1.
    """
    rounded = partial(theirs, rounding_mode=rounding_mode)
    if rounding_mode == "floor":
        return _computed_wide(_floor_quotient)(rounded, a, b)
    if rounding_mode is not None and torch.result_type(a, b) in HALF:
        return _computed_wide(lambda a, b: torch.div(a, b).trunc())(rounded, a, b)
    if (
        rounding_mode is None
        or torch.result_type(a, b).is_floating_point
        or (type(b) is int and b not in (0, -1))
    ):
        return rounded(a, b)
    a, b = _tensors(a, b)
    down = torch.div(a, b, rounding_mode="floor")
    return torch.where((a != down * b) & ((a < 0) != (b < 0)), down + 1, down)


def _tensors(a: Any, b: Any) -> tuple[Any, Any]:
    like = a if isinstance(a, torch.Tensor) else b
    dtype = torch.result_type(a, b)
    return tuple(
        item.to(dtype) if isinstance(item, torch.Tensor) else like.new_full((), item, dtype=dtype)
        for item in (a, b)
    )  # type: ignore[return-value]


def _add_product(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    """The number times the first factor comes first: 0 times an overflow would be NaN."""
    return x + (a if value == 1 else a * value) * b


def _add_quotient(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + (a if value == 1 else a * value) / b


def _power(theirs: Formula, x: torch.Tensor, exponent: Any) -> Any:
    """Roots of -0.0 and of negative infinity are those of `sqrt`, but in float16, where they are those of `pow`."""
    if x.dtype is torch.float16 and exponent in (0.5, -0.5):
        return torch.pow(x.float(), torch.full((), exponent, device=x.device)).to(x.dtype)
    if x.is_floating_point() and exponent == -0.5:
        return x.rsqrt()
    return theirs(x, exponent)


def _scaled(_theirs: Formula, x: torch.Tensor, exponent: torch.Tensor) -> Any:
    """The power of 2 is a number of the type, in half types 0 or infinite where the product need not be."""
    return x * torch.pow(2.0, exponent)


def _next_number(theirs: Formula, a: Any, b: Any) -> Any:
    """In half types from the bits: in float32, in which their loops compute, the next number rounds to the same one."""
    dtype = torch.result_type(a, b)
    if dtype not in HALF:
        return theirs(a, b)
    a, b = a.to(dtype), b.to(dtype)
    away = torch.where((b > a) == (a > 0), 1, -1)
    moved = (a.view(torch.int16).to(torch.int32) + away).to(torch.int16).view(dtype)
    limits = torch.finfo(dtype)
    least = torch.copysign(torch.full_like(b, limits.smallest_normal * limits.eps), b)
    moved = torch.where(a == 0, least, moved)
    return torch.where(a.isnan() | b.isnan(), a + b, torch.where(a == b, b, moved))


def _rounded_to_decimals(theirs: Formula, x: torch.Tensor, *, decimals: int = 0) -> Any:
    """By a power of ten that is a whole number: a product with its inverse rounds twice, and may overflow."""
    if not x.is_floating_point():
        return theirs(x, decimals=decimals)
    power = 10.0 ** abs(decimals)
    wide = x.float() if x.dtype in HALF else x
    return ((wide / power).round() * power if decimals < 0 else (wide * power).round() / power).to(x.dtype)


def _converted(theirs: Formula, x: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Floats that a small integer type does not hold are whole numbers modulo its size, as on x86 in eager mode.

    C++ leaves that open: vectors of Inductor take the largest number instead.
    """
    if dtype in _SMALL and x.is_floating_point():
        x = theirs(x, dtype=torch.int32)
    return theirs(x, dtype=dtype, **options)


FORMULAS: dict[Any, Formula] = {
    aten.remainder.Tensor: _computed_wide(_remainder),
    aten.remainder.Scalar: _computed_wide(_remainder, round_numbers=True),
    aten.remainder.Scalar_Tensor: _computed_wide(_remainder, round_numbers=True),
    aten.div.Tensor_mode: _quotient,
    aten.div.Scalar_mode: _quotient,
    aten.addcmul.default: _computed_wide(_add_product),
    aten.addcdiv.default: _computed_wide(_add_quotient),
    aten.pow.Tensor_Scalar: _power,
    aten.ldexp.Tensor: _scaled,
    aten.nextafter.default: _next_number,
    aten.round.decimals: _rounded_to_decimals,
    aten._to_copy.default: _converted,
}
