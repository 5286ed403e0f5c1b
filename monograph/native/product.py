"""Products of two matrices of float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monograph.layout import Layout
from monograph.native.code import Code

_MOST_MULTIPLICATIONS = 1 << 27  # above, libraries are as fast
_FEWEST_FOR_THREADS = 1 << 18  # multiplications; fewer take one thread as long as waking another
_COLUMNS = 64  # that one thread takes at least


@dataclass(frozen=True)
class Product:
    """`a b`, or `a b + bias` with a number for each column."""

    a: Layout
    b: Layout
    has_bias: bool = False
    threads: int = 1

    @classmethod
    def of(cls, operands: Sequence[Layout], _: Sequence[Any], threads: int) -> Product:
        """The product of `a` and `b`, plus a third operand if there is one."""
        a, b, *bias = operands
        return cls(a, b, bool(bias), threads)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of `a`, columns of `a`, columns of `b`."""
        (m, k), (_, n) = self.a.shape, self.b.shape
        return m, k, n

    @property
    def results(self) -> tuple[Layout, ...]:
        """What it gives."""
        return (Layout.contiguous(self.a.shape[0], self.b.shape[1]),)

    @property
    def operands(self) -> tuple[Layout, ...]:
        """What it has to be given."""
        b = self.b if 1 in self.b.stride else Layout.contiguous(*self.b.shape)
        return (self.a, b, Layout.contiguous(b.shape[1]))[: 2 + self.has_bias]

    @property
    def can_be_made(self) -> bool:
        """True if there is code for it: not huge, not empty, in an int's reach, and `b` stored by rows or by columns."""
        fits = 0 < math.prod(self.sizes) <= _MOST_MULTIPLICATIONS and 1 in self.b.stride
        return fits and self.a.is_in_reach and self.b.is_in_reach

    @property
    def used_threads(self) -> int:
        """How many threads share it."""
        m, k, n = self.sizes
        if m * k * n < _FEWEST_FOR_THREADS:
            return 1
        return min(self.threads, -(-max(m, n) // _COLUMNS))

    @property
    def code(self) -> Code:
        """Its function."""
        numbers = [*self.sizes, *self.a.stride, *self.b.stride, self.used_threads]
        name = "_".join(["monograph_product", *map(str, numbers), *(["bias"] * self.has_bias)])
        tensors = ("a", "b", "bias", "c") if self.has_bias else ("a", "b", "c")
        bias = "bias" if self.has_bias else "nullptr"
        call = f"Product<{', '.join(map(str, numbers))}>::of(a, b, {bias}, c)"
        return Code(name, ("rows", "product"), tensors, call)
