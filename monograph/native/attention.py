"""Attention of float32, and its gradients."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from monograph.layout import Layout
from monograph.native.code import Code

_MOST_NUMBERS = 1 << 18  # that a head needs on the stack
_GROUP, _BLOCK, _WIDEST_REGISTER = 12, 48, 16  # as in the header, at most
_FEWEST_FOR_THREADS = 1 << 18  # multiplications
BY_POSITIONS = (0, 2, 1)  # images, positions, heads
_FORWARD, _BACKWARD = ("q", "k", "v"), ("grad", "q", "k", "v", "out", "logarithms")


@dataclass(frozen=True)
class Attention:
    """`softmax(scale q k^T) v` with the logarithms of the sums, or the gradients of `q`, `k` and `v`, in one block."""

    gives: Literal["forward", "backward"]
    given: tuple[Layout, ...]
    is_causal: bool
    scale: float
    threads: int = 1
    order: tuple[int, ...] = BY_POSITIONS  # of the result in memory

    @classmethod
    def of(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> Attention:
        """Attention; options are whether a query sees only keys up to its own position, the scale, and the result's order."""
        is_causal, scale, order = options
        return cls("forward", tuple(operands), is_causal, scale, threads, tuple(order))

    @classmethod
    def of_gradient(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> Attention:
        """Its gradients, from that of the result, what it was given and what it gave; options are the first two of these."""
        is_causal, scale = options
        return cls("backward", tuple(operands), is_causal, scale, threads)

    @property
    def _roles(self) -> tuple[str, ...]:
        return _FORWARD if self.gives == "forward" else _BACKWARD

    @property
    def _named(self) -> dict[str, Layout]:
        return dict(zip(self._roles, self.given, strict=True))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Images of the batch, heads, queries, keys, and numbers of each."""
        images, heads, queries, deep = self._named["q"].shape
        return images, heads, queries, self._named["k"].shape[2], deep

    @property
    def results(self) -> tuple[Layout, ...]:
        """What it gives: each part by images, positions and heads, but for the result of attention itself."""
        images, heads, queries, keys, deep = self.sizes
        for_each = queries * (deep + 1) if self.gives == "forward" else (queries + 2 * keys) * deep
        return (Layout.contiguous(images * heads * for_each),)

    @property
    def operands(self) -> tuple[Layout, ...]:
        """What it has to be given: the numbers of a position side by side."""
        return tuple(
            item if len(item.shape) == 3 or item.stride[-1] == 1 else Layout.contiguous(*item.shape)
            for item in self.given
        )

    @property
    def _on_stack(self) -> int:
        """Numbers that a head needs there, at most."""
        _, _, queries, keys, deep = self.sizes
        across, down = keys + _WIDEST_REGISTER, deep + _WIDEST_REGISTER
        block = min(_BLOCK, queries + _GROUP)
        return 5 * across * down + 2 * block * (down + across + _WIDEST_REGISTER)

    @property
    def can_be_made(self) -> bool:
        """True if there is code for it: nothing is empty or beyond an int's reach, a head fits on the stack, the scale is positive."""
        images, heads, queries, keys, deep = self.sizes
        shapes = {
            **dict.fromkeys(("q", "out", "grad"), (images, heads, queries, deep)),
            **dict.fromkeys(("k", "v"), (images, heads, keys, deep)),
            "logarithms": (images, heads, queries),
        }
        fits = all(item.shape == shapes[role] for role, item in self._named.items())
        reached = all(item.is_in_reach for item in (*self.given, *self.operands, *self.results))
        whole = min(self.sizes) > 0 and 0 < self.scale < math.inf
        return fits and reached and whole and self._on_stack <= _MOST_NUMBERS

    @property
    def used_threads(self) -> int:
        """How many threads share it."""
        images, heads, queries, keys, deep = self.sizes
        enough = images * heads * queries * keys * deep >= _FEWEST_FOR_THREADS
        return min(self.threads, images * heads) if enough else 1

    @property
    def _made(self) -> list[int]:
        """The steps of what it gives first."""
        images, heads, queries, _, deep = self.sizes
        steps, step = [0, 0, 0], deep
        for item in reversed(self.order):
            steps[item] = step
            step *= (images, heads, queries)[item]
        return steps

    @property
    def code(self) -> Code:
        """Its function."""
        causal = str(self.is_causal).lower()
        numbers = [*map(str, self.sizes), causal, str(self.used_threads)]
        steps = [*(item.stride[:3] for item in self.operands), self._made]
        scale = struct.unpack("<f", struct.pack("<f", self.scale))[0]
        bits = struct.pack("<f", scale).hex()
        known = [str(step) for item in steps for step in item]
        name = "_".join(["monograph_attention", self.gives, *numbers, *known, bits])
        given = [
            f"{role}, {{{', '.join(map(str, item))}}}"
            for role, item in zip((*self._roles, f"{scale!r}f, made"), steps, strict=True)
        ]
        call = f"Attention<{', '.join(numbers)}>::{self.gives}({', '.join(given)})"
        return Code(name, ("rows", "product", "attention"), (*self._roles, "made"), call)
