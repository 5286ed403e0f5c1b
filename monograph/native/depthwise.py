"""Convolutions of images of float32 with one filter for each channel, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from monograph.layout import Layout
from monograph.native.code import Code

_MOST_TAPS = 25  # whose sums stay in registers
_MOST_NUMBERS = 1 << 15  # of all filters, which are copied to the stack
_FEWEST_FOR_THREADS = 1 << 16  # multiplications


@dataclass(frozen=True)
class Depthwise:
    """A convolution of images with filters, or the gradient of one of them from that of the result."""

    gives: Literal["forward", "of_image", "of_weight"]
    image: tuple[int, ...]  # number, channels, height, width
    kernel: tuple[int, ...]  # height and width; so the next two
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    threads: int = 1

    @classmethod
    def of(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> Depthwise:
        """The convolution of images with filters; options are stride and padding."""
        image, weight = operands
        stride, padding = map(tuple, options)
        return cls("forward", image.shape, weight.shape[2:], stride, padding, threads)

    @classmethod
    def of_image(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> Depthwise:
        """The gradient of the images, from that of the result and the filters; options begin with the images' size."""
        _, weight = operands
        size, stride, padding = map(tuple, options)
        return cls("of_image", size, weight.shape[2:], stride, padding, threads)

    @classmethod
    def of_weight(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> Depthwise:
        """The gradient of the filters, from that of the result and the images; options begin with the filters' size."""
        _, image = operands
        size, stride, padding = map(tuple, options)
        return cls("of_weight", image.shape, size[2:], stride, padding, threads)

    @property
    def made(self) -> tuple[int, int]:
        """Height and width of the images that the convolution makes."""
        sides = zip(self.image[2:], self.kernel, self.stride, self.padding, strict=True)
        height, width = (
            (size + 2 * padding - kernel) // stride + 1 for size, kernel, stride, padding in sides
        )
        return height, width

    @property
    def _all(self) -> dict[str, Layout]:
        """The images, the filters, and the images that the convolution makes."""
        count, channels = self.image[:2]
        return {
            "image": Layout.channels_last(*self.image),
            "weight": Layout.contiguous(channels, 1, *self.kernel),
            "made": Layout.channels_last(count, channels, *self.made),
        }

    @property
    def _roles(self) -> tuple[str, str, str]:
        """What it takes and, last, what it gives."""
        roles: dict[str, tuple[str, str, str]] = {
            "forward": ("image", "weight", "made"),
            "of_image": ("made", "weight", "image"),
            "of_weight": ("made", "image", "weight"),
        }
        return roles[self.gives]

    @property
    def results(self) -> tuple[Layout, ...]:
        """What it gives."""
        return (self._all[self._roles[2]],)

    @property
    def operands(self) -> tuple[Layout, ...]:
        """What it has to be given."""
        return tuple(self._all[role] for role in self._roles[:2])

    @property
    def can_be_made(self) -> bool:
        """True if there is code for it: nothing is empty or beyond an int's reach, and the filters are few and small enough for the stack."""
        taps = math.prod(self.kernel)
        fits = taps <= _MOST_TAPS and taps * self.image[1] <= _MOST_NUMBERS
        whole = min(*self.image, *self.kernel, *self.made) > 0
        return fits and whole and all(item.is_in_reach for item in self._all.values())

    @property
    def used_threads(self) -> int:
        """How many threads share it."""
        work = math.prod((*self.image[:2], *self.made, *self.kernel))
        return self.threads if work >= _FEWEST_FOR_THREADS else 1

    @property
    def code(self) -> Code:
        """Its function."""
        numbers = [
            *self.image,
            *self.made,
            *self.kernel,
            *self.stride,
            *self.padding,
            self.used_threads,
        ]
        name = "_".join(["monograph_depthwise", self.gives, *map(str, numbers)])
        call = f"Depthwise<{', '.join(map(str, numbers))}>::{self.gives}({', '.join(self._roles)})"
        return Code(name, ("rows", "depthwise"), self._roles, call)
