"""Formulas of eager's kernels: each is proved on this machine, and one that is off by a last place is not believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from monograph.compat.ops import schema_arguments
from monograph.elementwise import proof
from monograph.elementwise.formulas import ALL_FORMULAS, CHAINED, FORMULAS, Formula
from monograph.elementwise.proof import Form, prove, same_bits

KINDS = ("float", "double")


def plain_form(op: torch._ops.OpOverload, kind: str) -> Form:
    """An op with all its numbers given, but for what only multiples of tensors have."""
    if op in (torch.ops.aten.add.Scalar, torch.ops.aten.sub.Scalar):
        return number_form(op, kind)
    arguments = schema_arguments(op)
    numbers = tuple(item.name for item in arguments if item.kind != "Tensor")
    is_logical = op.__name__.startswith("logical")
    masks = tuple(item.name for item in arguments if is_logical or item.name in ("condition", "mask"))
    return Form(op, kind, numbers, (), masks)


def number_form(op: torch._ops.OpOverload, kind: str) -> Form:
    """An op with a number in the place of its second tensor, and the others left at their defaults."""
    first, second, *others = [item.name for item in schema_arguments(op)]
    assert first
    return Form(op, kind, (second,), tuple(others))


def found(form: Form) -> int:
    """Which text of a formula holds; -1 for none."""
    proof._FOUND.pop(form, None)
    prove([form])
    return proof._FOUND.pop(form)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ALL_FORMULAS, ids=str)
def test_a_text_of_each_formula_has_the_bits_of_eagers_kernel(op: torch._ops.OpOverload, kind: str) -> None:
    assert found(plain_form(op, kind)) >= 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_numbers_in_the_place_of_tensors(name: str, kind: str) -> None:
    assert found(number_form(getattr(torch.ops.aten, name).Tensor, kind)) >= 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mul", "self * other * (1 + 1.2e-7f)"),  # a last place
        ("mul", "self * other + 0"),  # the sign of a zero
        ("mul", "self != self ? self : self * other"),  # a NaN by another one is one all the same
        ("div", "self * (1 / other)"),
        ("add", "alpha * other + self == 0 ? 0 : merged(alpha, other, self)"),
        ("add", "absolute(self) < 1e-38f ? alpha * other : merged(alpha, other, self)"),  # denormals
    ],
)
def test_a_formula_that_is_almost_right_is_not_believed(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = getattr(torch.ops.aten, name).Tensor
    monkeypatch.setitem(FORMULAS, op, Formula((text, *FORMULAS[op].texts)))  # type: ignore[arg-type]
    believed = name == "mul" and text.startswith("self != self")
    assert found(plain_form(op, "float")) == (0 if believed else 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("relu.default", "self > (T)0 ? self : (T)0"),  # a NaN, and the sign of a zero
        ("threshold_backward.default", "self < threshold ? (T)0 : grad_output"),
        ("threshold_backward.default", "self > threshold ? grad_output : (T)0"),  # a NaN
        ("clamp.default", "self > max ? max : self < min ? min : self"),  # bounds that cross
        ("sgn.default", "self > (T)0 ? (T)1 : (T)-1"),
        ("rsqrt.default", "(T)(1 / sqrt((double)self))"),  # rounded once
        ("where.self", "condition ? self : other == other ? other : (T)0"),
        ("lt.Tensor", "!(self >= other)"),
        ("pow.Tensor_Scalar", "exponent == (T)2 ? self * self : self * self * self"),
    ],
)
def test_a_formula_of_chains_that_is_almost_right_is_not_believed(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    monkeypatch.setitem(CHAINED, op, replace(CHAINED[op], texts=(text,)))  # type: ignore[arg-type]
    assert found(plain_form(op, "float")) == -1


def test_the_sign_of_a_zero_counts_and_the_payload_of_a_nan_does_not() -> None:
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(nan, torch.tensor([0.0]))
