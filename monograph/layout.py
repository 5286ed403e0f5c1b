"""The layout of tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_NUMBER: Final = 1 << 62  # of a dimension or a stride


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
        """Images or volumes without gaps, the channels of a pixel side by side."""
        images, channels, *size = shape
        first, *others, channel = contiguous_stride((images, *size, channels))
        return cls(shape, (first, channel, *others))

    @property
    def is_in_reach(self) -> bool:
        """True if a C++ `int` can address each element."""
        return extent(self.shape, self.stride) <= 1 << 31

    def is_like(self, other: Layout) -> bool:
        """True for tensors of the same layout; steps along dimensions of one element mean nothing."""
        steps = zip(self.shape, self.stride, other.stride, strict=True)
        return self.shape == other.shape and all(size == 1 or step == want for size, step, want in steps)

    @property
    def is_ambiguous(self) -> bool:
        """True for channels-last images or volumes that are contiguous as well: of one pixel, or of one channel.

        torch's kernels choose by the strides of such tensors; those that give one give it the one or the other.
        """
        if len(self.shape) not in (4, 5) or not self.is_like(Layout.contiguous(*self.shape)):
            return False
        return self.stride == Layout.channels_last(*self.shape).stride != contiguous_stride(self.shape)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that torch gives to a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def fills_a_block(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements are one block of memory without holes or overlap, in any order; False if there are none."""
    if not all(0 <= step < MAX_NUMBER for step in stride) or 0 in shape:
        return False
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def extent(shape: Sequence[int], stride: Sequence[int], element_size: int = 1) -> int:
    """The number of elements, or of bytes, from the first element of a tensor to the end of its last."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * element_size
