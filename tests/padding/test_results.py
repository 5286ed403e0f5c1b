"""How results follow sizes is taken from what was seen, and from enough of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monograph.padding.arguments import Fit
from monograph.padding.results import Observation, Rules


def seen(size: tuple[int, ...], *shape: int) -> Observation:
    return Observation.of(size, torch.empty(shape))


def cut(rules: Rules, shape: tuple[int, ...], *fits: tuple[int, int]) -> Any:
    result, left = rules.cut(torch.empty(shape), [Fit("x", *fit) for fit in fits], {})
    return "left" if left else tuple(result.shape)


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        ([((8,), 8), ((5,), 5), ((2,), 2)], (5,)),
        ([((8,), 8), ((5,), 5)], (5,)),  # the size itself
        ([((8,), 8), ((7,), 7)], "left"),  # by one: half of 16 and 14, and the like
        ([((8,), 7), ((5,), 4), ((2,), 1)], (4,)),
        ([((8,), 7), ((5,), 4)], "left"),  # might be a part of the size
        ([((8,), 4), ((5,), 3), ((2,), 1)], "left"),
        ([((8,), 4), ((7,), 4), ((3,), 2)], "left"),
        ([((8,), 16), ((5,), 10), ((2,), 4)], "left"),
        ([((8,), 8), ((5,), 8), ((2,), 8)], (8,)),  # of another origin
    ],
)
def test_one_group(observations: list[tuple[tuple[int, ...], int]], expected: Any) -> None:
    rules = Rules.seen_in([seen(sizes, size) for sizes, size in observations])
    assert cut(rules, (observations[0][1],), (5, 8)) == expected


def test_two_groups() -> None:
    apart = Rules.seen_in([seen((8, 8), 8, 8), seen((5, 5), 5, 5), seen((2, 1), 1, 2)])
    assert cut(apart, (8, 8), (5, 8), (6, 8)) == (6, 5)
    alike = Rules.seen_in([seen((8, 8), 8), seen((5, 5), 5)])
    assert cut(alike, (8,), (5, 8), (6, 8)) == "left"
    product = Rules.seen_in([seen((8, 4), 32), seen((5, 3), 15), seen((2, 2), 4)])
    assert cut(product, (32,), (5, 8), (3, 4)) == "left"


def test_what_has_another_form_than_before_is_left() -> None:
    rules = Rules.seen_in([seen((8,), 9), seen((5,), 6), seen((2,), 3)])
    assert cut(rules, (9,), (6, 8)) == (7,)
    assert cut(rules, (11,), (6, 8)) == "left"  # two tokens more are before it
    assert cut(rules, (), (6, 8)) == "left"
    assert rules.cut((torch.empty(9), 3), [Fit("x", 6, 8)], {})[1] == ["result"]


def test_numbers_and_scalars_are_as_they_are() -> None:
    rules = Rules.seen_in([Observation.of((size,), (torch.tensor(1.0), 3, None)) for size in (8, 5)])
    result = (torch.tensor(2.0), 3, None)
    assert rules.cut(result, [Fit("x", 5, 8)], {}) == (result, [])
