"""The layout of tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The shape of a tensor, and the steps from one element to the next along each dimension."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def contiguous(cls, *shape: int) -> Layout:
        """Without gaps, the elements of the last dimension side by side."""
        return cls(shape, contiguous_stride(shape))

    @classmethod
    def channels_last(cls, *shape: int) -> Layout:
        """Images without gaps, the channels of a pixel side by side."""
        _, channels, height, width = shape
        return cls(shape, (height * width * channels, 1, width * channels, channels))

    @property
    def is_in_reach(self) -> bool:
        """True if a C++ `int` can address each element."""
        return extent(self.shape, self.stride) <= 1 << 31

    def is_like(self, other: Layout) -> bool:
        """True for tensors of the same layout; steps along dimensions of one element mean nothing."""
        steps = zip(self.shape, self.stride, other.stride, strict=True)
        return self.shape == other.shape and all(size == 1 or step == want for size, step, want in steps)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives to a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], stride: Sequence[int], element_size: int = 1) -> int:
    """The number of elements, or of bytes, from the first element of a tensor to the end of its last."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * element_size
