"""Attributes of a global, for which code looks by names that it makes up: a change is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monograph as mg


class Settings:
    scale: float


SETTINGS = Settings()
FORMAT = "{0.scale}"
PARTS = ["sc", "ale"]


class Looks:
    """Has `getattr` under a name of its own."""

    def __init__(self) -> None:
        self.find = getattr


LOOKS = Looks()


def by_default(find: Any = getattr) -> Any:
    return find(SETTINGS, "".join(PARTS))


READS: dict[str, Callable[[], Any]] = {
    "getattr": lambda: getattr(SETTINGS, "".join(PARTS)),
    "vars": lambda: vars(SETTINGS)["".join(PARTS)],
    "a format": lambda: FORMAT.format(SETTINGS),
    "a default": by_default,
    "an attribute": lambda: LOOKS.find(SETTINGS, "".join(PARTS)),
}


@pytest.mark.parametrize("name", READS)
def test_a_change_is_seen(name: str) -> None:
    read = READS[name]

    class Step(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(read())

    step = Step()
    for scale in (2.0, 2.0, 3.0, 5.0):
        SETTINGS.scale = scale
        assert torch.equal(step(torch.ones(2)), torch.full((2,), scale))
    assert len(step.builds) <= 3
