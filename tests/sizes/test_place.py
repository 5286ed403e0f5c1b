"""Where sizes are found among the shapes of inputs."""

from __future__ import annotations

import torch

from monograph.sizes.expression import Expression
from monograph.sizes.place import SizePlace, places_in, size_places
from monograph.sizes.size import Size

ROWS, LENGTH = Size(3, Expression.of("rows")), Size(5, Expression.of("length"))


def test_the_first_place_of_each_size() -> None:
    shapes = [(7, LENGTH), (), (ROWS, LENGTH, ROWS)]
    assert size_places(shapes) == {"length": SizePlace(0, 1), "rows": SizePlace(2, 0)}
    assert len(list(places_in(shapes))) == 4


def test_undivided_sizes_come_first() -> None:
    assert size_places([(ROWS * 4,), (ROWS * 2, 2)]) == {"rows": SizePlace(1, 0, 2)}
    assert size_places([(ROWS * 4,), (ROWS,), (ROWS * 2,)]) == {"rows": SizePlace(1, 0)}


def test_places_as_python() -> None:
    x = torch.zeros(12, 5)
    for place, size in ((SizePlace(0, 1), 5), (SizePlace(0, 0, 4), 3)):
        assert eval(f"30 // {place.text('x')}", {"x": x}) == 30 // size
