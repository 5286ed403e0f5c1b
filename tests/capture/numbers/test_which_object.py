"""Numbers that move in lists and dicts, where code asks which of several equal ones is there."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monograph as mg
from tests.support import assert_same

X = torch.ones(1)


def found(h: Any) -> Any:
    return h.current


ASKED: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda h, first: h.current is first,
    "is not": lambda h, first: not (first is not h.current),
    "of a call": lambda h, first: found(h) is first,
    "of a variable": lambda h, first: any(item is first for item in [h.current]),
    "id": lambda h, first: id(h.current) == id(first),
}
MADE: dict[str, Callable[[], Any]] = {"dict": lambda: {"k": 1.0}, "list": lambda: [1.0, 2]}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("asked", ASKED)
def test_equal_ones_in_turn_are_told_apart(asked: str, kind: str) -> None:
    def results(make: Callable[[Any], Any]) -> list[torch.Tensor]:
        both = [MADE[kind](), MADE[kind]()]
        h, first = types.SimpleNamespace(current=both[0]), both[0]
        step, made = make(lambda x: x * (2 if ASKED[asked](h, first) else 3)), []
        for index in (0, 1, 0, 1, 1, 0):
            h.current = both[index]
            made.append(step(X))
        return made

    assert_same(results(lambda function: function), results(mg.trace))


def test_others_still_move() -> None:
    """A comparison of other objects takes nothing from numbers that move."""
    h, marker = types.SimpleNamespace(current={"k": 1.0}, kind=object()), object()
    step = mg.trace(lambda x: x * h.current["k"] * (2 if h.kind is marker else 3))
    for number in range(6):
        h.current = {"k": 1.0 + number}
        assert_same(X * (1.0 + number) * 3, step(X))
    assert len(step.builds) == 2
