"""The layout of tensors whose sizes and strides may vary, as C++ asks for it, and the form of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from monograph.capture.numbers.moving import value_of
from monograph.ir.meta import size_in


def _fills(sizes: Sequence[Any], strides: Sequence[Any], order: Sequence[int]) -> bool:
    """True if a tensor fills a block of memory, with these dimensions from the innermost to the outermost."""
    expected: Any = 1
    for dim in order:
        if sizes[dim] == 1:
            continue
        if strides[dim] != expected:
            return False
        expected = expected * sizes[dim]
    return True


def _is_contiguous(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    return any(size == 0 for size in sizes) or _fills(sizes, strides, range(len(sizes))[::-1])


def _has_channels_last(rank: int) -> Callable[..., bool]:
    order = [1, *range(2, rank)[::-1], 0]

    def run(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
        return len(sizes) == rank and _fills(sizes, strides, order)

    return run


def _has_strides_of_channels_last(rank: int) -> Callable[..., bool]:
    order = [1, *range(2, rank)[::-1], 0]

    def run(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
        if len(sizes) != rank or strides[1] == 0:
            return False
        least: Any = 0
        for dim in order:
            if sizes[dim] == 0 or strides[dim] < least:
                return False
            if dim == 0 and least == strides[1]:
                return False
            least = strides[dim]
            if sizes[dim] > 1:
                least = least * sizes[dim]
        return True

    return run


def is_dense(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    order = sorted(range(len(sizes)), key=lambda dim: (value_of(strides[dim]), value_of(sizes[dim])))
    return _fills(sizes, strides, order)


LAYOUTS: dict[str, Callable[..., bool]] = {
    "is_contiguous": _is_contiguous,
    "is_channels_last_contiguous_2d": _has_channels_last(4),
    "is_channels_last_contiguous_3d": _has_channels_last(5),
    "is_channels_last_strides_2d": _has_strides_of_channels_last(4),
    "is_channels_last_strides_3d": _has_strides_of_channels_last(5),
    "is_non_overlapping_and_dense": is_dense,
}


class ArgumentForm(NamedTuple):
    """What a tensor among the arguments is besides its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool

    def lies_as(self, other: ArgumentForm) -> bool:
        """True if both have the same layout."""
        return self[:-1] == other[:-1]


def argument_form(tensor: torch.Tensor) -> ArgumentForm:
    """The present form of a tensor."""
    return ArgumentForm(
        tuple(map(size_in, tensor.shape)),
        tuple(map(size_in, tensor.stride())),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.requires_grad,
    )
