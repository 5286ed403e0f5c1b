"""A size that varies is an int of its present value that computes and compares by its expression."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest

from monograph.sizes.expression import Expression
from monograph.sizes.size import Size, Undecided

B, H = Size(6, Expression.of("b")), Size(5, Expression.of("h"))


def test_arithmetic_gives_sizes() -> None:
    for made, text, value in (
        (B * 2 + H, "b * 2 + h", 17),
        (2 - B, "-b + 2", -4),
        (math.prod((B, 3, H)), "b * h * 3", 90),
        (sum([B, H]), "b + h", 11),
        (B // 4, "(b // 4)", 1),
    ):
        assert (type(made), str(made), int(made)) == (Size, text, value)


def test_what_no_longer_varies_is_a_plain_number() -> None:
    assert type(B - B) is int
    assert (B - B, B * 4 // B) == (0, 4)


def test_only_the_same_expression_is_equal() -> None:
    assert B * 2 == 2 * B
    assert B != 6
    assert B != 6
    assert {B * 2: 1}[2 * B] == 1
    assert (B, 3) != (6, 3)


def test_comparisons_that_hold_for_all_sizes() -> None:
    assert B > 1
    assert max(B, 1) == B
    assert B < B + 1
    assert B


@pytest.mark.parametrize("ask", [lambda: B > 3, lambda: B <= H, lambda: bool(B - H), lambda: max(B, 7)])
def test_others_are_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(Undecided, match="depends on the sizes"):
        ask()


def test_floats_take_the_present_value() -> None:
    assert B / 4 == 1.5
    assert B < 6.5


def test_copies() -> None:
    for made in (copy.deepcopy(B), pickle.loads(pickle.dumps(B))):
        assert (made, int(made)) == (B, 6)
