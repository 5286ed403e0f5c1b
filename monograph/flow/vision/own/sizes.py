"""Sizes of images and of their borders, and the short ways to write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Numbers = int | Sequence[int]


class Size(NamedTuple):
    """Rows and columns."""

    height: int
    width: int


class Borders(NamedTuple):
    """Pixels to add on each side."""

    left: int
    top: int
    right: int
    bottom: int


def both(size: Numbers) -> Size:
    """One number for both edges, or (h, w). ValueError for more."""
    numbers = [size] if isinstance(size, int) else list(size)
    if len(numbers) not in (1, 2):
        raise ValueError(f"a size is one number or (h, w), not {size}")
    return Size(numbers[0], numbers[-1])


def borders_of(padding: Numbers) -> Borders:
    """One number for all, two for left-right and top-bottom, or four. ValueError for others."""
    numbers = [padding] if isinstance(padding, int) else list(padding)
    if len(numbers) not in (1, 2, 4):
        raise ValueError(f"padding is 1, 2 or 4 numbers, not {padding}")
    return Borders(*numbers * (4 // len(numbers)))


def resized(old: Size, size: Numbers, max_size: int | None) -> Size:
    """The size an image gets: (h, w) itself, or the smaller edge and what keeps the proportions."""
    numbers = [size] if isinstance(size, int) else list(size)
    if len(numbers) == 2:
        return Size(*numbers)
    short, long = numbers[0], int(numbers[0] * max(old) / min(old))
    if max_size is not None and max_size <= short:
        raise ValueError(f"max_size, {max_size}, must be greater than the size of the smaller edge, {short}")
    if max_size is not None and long > max_size:
        short, long = int(max_size * short / long), max_size
    return Size(long, short) if old.width <= old.height else Size(short, long)
