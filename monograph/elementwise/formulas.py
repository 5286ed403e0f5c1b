"""What eager's kernels compute for one element, in C: a table by op. `proof.py` finds out what holds on a machine."""

from __future__ import annotations

import math
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
ONE_THREAD = 32768  # elements up to which eager's kernels take one thread
ONE_THREAD_CALLED = 2048  # the same for functions in `CALLED`


@dataclass(frozen=True)
class Formula:
    """An element of the result, from those of the arguments by their names in the op's schema.

    Eager's kernels merge some products with sums on processors that can: `texts` are what they may compute, the likeliest
    first. `unless` is a condition on numbers for which their loops for vectors and for the last elements disagree. `only` has
    the values of an argument that it holds for, which has to be one of them; `is_test` is set where the result is a bool.
    """

    texts: tuple[str, ...]
    unless: str = ""
    only: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    is_test: bool = False

    def written(self, choice: int, names: Mapping[str, str]) -> str:
        """One of the texts with the names of values put in."""
        return _put_in(self.texts[choice], names)

    def refused(self, names: Mapping[str, str]) -> str:
        """The condition with the names of values put in."""
        return _put_in(self.unless, names)


def constant(number: float | None, kind: str) -> str:
    """A number in C, of the type of the elements; one that is left out is a NaN, which bounds nothing."""
    return "NAN" if number is None else f"(({kind}){float(number)!r})"


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

_POWERS = (
    "exponent == (T)1 ? self : exponent == (T)2 ? self * self : exponent == (T)3 ? self * self * self : "
    "exponent == (T)-1 ? (T)1 / self : (T)1 / (self * self)"
)
_LOWER, _UPPER = "(self < {low} ? {low} : self)", "({low} > {high} ? {high} : {low})"
_CLAMPED = _UPPER.format(low=_LOWER.format(low="{low}"), high="{high}")


def _test(text: str) -> Formula:
    return Formula((text,), is_test=True)


# What else is computed in chains of forward and backward; elements of a `bool` tensor are `bool` in C.
CHAINED: Mapping[Any, Formula] = {
    aten.rsub.Scalar: _of("merged(-alpha, self, other)", "other - alpha * self"),
    aten.rsqrt.default: _of("(T)1 / squareroot(self)"),
    aten.pow.Tensor_Scalar: Formula((_POWERS,), only={"exponent": (1, 2, 3, -1, -2)}),
    aten.sgn.default: _of("(T)((self > (T)0) - (self < (T)0))"),
    aten.sign.default: _of("(T)((self > (T)0) - (self < (T)0))"),
    aten.relu.default: _of("self < (T)0 ? (T)0 : self", "self > (T)0 ? self : self != self ? self : (T)0"),
    aten.threshold_backward.default: _of("self <= threshold ? (T)0 : grad_output"),
    aten.clamp.default: _of(_CLAMPED.format(low="min", high="max")),
    aten.clamp_min.default: _of(_LOWER.format(low="min")),
    aten.clamp_max.default: _of("self > max ? max : self"),
    aten.hardtanh.default: _of(_CLAMPED.format(low="min_val", high="max_val")),
    aten.leaky_relu.default: _of("self > (T)0 ? self : self * negative_slope"),
    aten.sigmoid_backward.default: _of(
        "grad_output * ((T)1 - output) * output", "grad_output * (((T)1 - output) * output)"
    ),
    aten.tanh_backward.default: _of(
        "grad_output * ((T)1 - output * output)", "grad_output * merged(-output, output, (T)1)"
    ),
    aten.where.self: _of("condition ? self : other"),
    aten.masked_fill.Scalar: _of("mask ? value : self"),
    aten.logical_and.default: _test("self && other"),
    aten.logical_or.default: _test("self || other"),
    aten.logical_not.default: _test("!self"),
    **{
        getattr(getattr(aten, name), overload): _test(f"self {sign} other")
        for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items()
        for overload in ("Tensor", "Scalar")
    },
}
ALL_FORMULAS: Mapping[Any, Formula] = ChainMap(FORMULAS, CHAINED)  # type: ignore[arg-type]


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
