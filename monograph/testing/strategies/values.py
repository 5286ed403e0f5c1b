"""The contents of tensors: made from a kind and a seed, never element by element."""

from __future__ import annotations

import math
from typing import Final, Literal

import torch

# "whole" numbers read easily, "uniform" and "normal" are ordinary data, "special" is sprinkled with odd numbers
Values = Literal["whole", "uniform", "normal", "special"]
VALUES: Final[tuple[Values, ...]] = ("whole", "uniform", "normal", "special")


def fill(
    count: int, dtype: torch.dtype, values: Values, seed: int, low: float | None, high: float | None
) -> torch.Tensor:
    """A flat tensor of `count` elements; equal arguments give equal bits. `high` itself does not occur."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        part = dtype.to_real()
        parts = [_reals(count, part, values, generator, low, high) for _ in range(2)]
        return torch.complex(*(p.double() for p in parts)).to(dtype)
    return _reals(count, dtype, values, generator, low, high)


def special_numbers(dtype: torch.dtype) -> tuple[float, ...]:
    """The numbers at which kernels go wrong: NaN, infinities, both zeros, denormals, the largest ones."""
    if dtype is torch.bool:
        return (0, 1)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return (0, 1, limits.min, limits.max)
    facts = torch.finfo(dtype)
    denormal = facts.smallest_normal * facts.eps
    return (
        *(math.nan, math.inf, -math.inf, -0.0, 0.0),
        *(denormal, -denormal, facts.smallest_normal, facts.max, facts.min),
    )


def _reals(
    count: int,
    dtype: torch.dtype,
    values: Values,
    generator: torch.Generator,
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    if values == "special":
        plain = _reals(count, dtype, "whole", generator, low, high)
        odd = torch.tensor(special_numbers(dtype), dtype=dtype)
        chosen = odd[torch.randint(len(odd), (count,), generator=generator)]
        return torch.where(torch.rand(count, generator=generator) < 0.5, chosen, plain)
    if values == "whole" or not dtype.is_floating_point:
        first = _lowest(dtype) if low is None else math.floor(low)
        last = _highest(dtype) if high is None else math.ceil(high)
        return torch.randint(first, max(last, first + 1), (count,), generator=generator).to(dtype)
    if values == "normal":
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    low, high = -1.0 if low is None else low, 1.0 if high is None else high
    return (torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)


def _lowest(dtype: torch.dtype) -> int:
    return -5 if dtype.is_signed else 0


def _highest(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.bool else 6
