"""Sizes that are declared by a range."""

from __future__ import annotations

import pytest

import monograph as mg
from monograph.ir.call.dims import Dim


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("dim", "size"), [(mg.Dim("rows"), 2), (mg.Dim("rows", max=1), 1), (mg.Dim("rows", min=5, max=9), 5)]
)
def test_the_size_that_stands_for_a_range_lies_within(dim: Dim, size: int) -> None:
    assert dim.example() == size


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("dim", "size"),
    [
        (mg.Dim("rows"), 8),
        (mg.Dim("rows", min=9), 12),
        (mg.Dim("rows", max=6), 4),
        (mg.Dim("rows", max=3), 2),  # no size in the range can be split
        (mg.Dim("rows", min=13, max=15), 13),
    ],
)
def test_it_can_be_split(dim: Dim, size: int) -> None:
    assert dim.example(parts=4) == size
