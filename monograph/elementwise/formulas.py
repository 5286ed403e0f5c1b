"""What eager's kernels compute for one element, in C: a table by op. `proof.py` finds out what holds on a machine."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Formula:
    """An element of the result, from those of the arguments by their names in the op's schema.

    Eager's kernels merge some products with sums on processors that can: `texts` are what they may compute, the likeliest
    first. `unless` is a condition on numbers for which their loops for vectors and for the last elements disagree.
    """

    texts: tuple[str, ...]
    unless: str = ""

    def written(self, choice: int, names: Mapping[str, str]) -> str:
        """One of the texts with the names of values put in."""
        return _put_in(self.texts[choice], names)

    def refused(self, names: Mapping[str, str]) -> str:
        """The condition with the names of values put in."""
        return _put_in(self.unless, names)


def _put_in(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\b[a-z]\w*\b", lambda found: names.get(found[0], found[0]), text)


def _of(*texts: str, unless: str = "") -> Formula:
    return Formula(texts, unless)


# T is the type of the elements, `merged(a, b, c)` is a * b + c rounded once.
FORMULAS: Mapping[Any, Formula] = {
    aten.add.Tensor: _of("merged(alpha, other, self)", "self + alpha * other"),
    aten.add.Scalar: _of("merged(alpha, other, self)", "self + alpha * other"),
    aten.sub.Tensor: _of("merged(-alpha, other, self)", "self - alpha * other"),
    aten.sub.Scalar: _of("merged(-alpha, other, self)", "self - alpha * other"),
    aten.mul.Tensor: _of("self * other"),
    aten.mul.Scalar: _of("self * other"),
    aten.div.Tensor: _of("self / other"),
    aten.div.Scalar: _of("self / other"),
    aten.neg.default: _of("-self"),
    aten.abs.default: _of("absolute(self)"),
    aten.reciprocal.default: _of("(T)1 / self"),
    aten.maximum.default: _of("self != self ? self : other != other ? other : self > other ? self : other"),
    aten.minimum.default: _of("self != self ? self : other != other ? other : self < other ? self : other"),
    aten.lerp.Scalar: _of(
        "absolute(weight) < (T)0.5 ? merged(weight, end - self, self) : merged(weight - (T)1, end - self, end)",
        "absolute(weight) < (T)0.5 ? self + weight * (end - self) : end - (end - self) * ((T)1 - weight)",
        unless="weight == (T)1",
    ),
    aten.addcmul.default: _of("merged(value * tensor1, tensor2, self)", "self + value * tensor1 * tensor2"),
    aten.addcdiv.default: _of("self + value * tensor1 / tensor2", "merged(value, tensor1 / tensor2, self)"),
}


@dataclass(frozen=True)
class Called:
    """A function that is left to eager's kernel. With `keeps_zeros` zeros are not shown to it: some take long for them."""

    op: Any
    keeps_zeros: bool = False


# Functions whose kernels compute in ways of their own, such as MKL's root, each element by itself: they are called on
# memory that stays in the processor's caches.
CALLED: Mapping[Any, Called] = {
    aten.sqrt.default: Called(aten.sqrt.out, keeps_zeros=True),
    aten.exp.default: Called(aten.exp.out),
    aten.log.default: Called(aten.log.out),
    aten.tanh.default: Called(aten.tanh.out),
}

# Python's own arithmetic on floats, on doubles; a result that is not finite is left to Python, which may raise.
NUMBERS: Mapping[Callable[..., Any], str] = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.neg: "(-{})",
    operator.pow: "power({}, {})",
    math.sqrt: "sqrt({})",
}
