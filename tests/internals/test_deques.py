"""A deque of numbers that the step computes is named in the error, with what to write."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monograph as mg

X = torch.ones(3)
LOSSES: deque[float] = deque(maxlen=3)


class OfGraph(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.losses: deque[float] = deque(maxlen=3)
        self.meter = SimpleNamespace(values=deque[float](maxlen=3))

    def build(self, x: torch.Tensor) -> Any:
        loss = x.square().mean()
        self.losses.append(loss.item())
        return loss


class OfObject(OfGraph):
    def build(self, x: torch.Tensor) -> Any:
        loss = x.square().mean()
        self.meter.values.append(loss.item())
        return loss


class OfModule(OfGraph):
    def build(self, x: torch.Tensor) -> Any:
        loss = x.square().mean()
        LOSSES.append(loss.item())
        return loss


@pytest.mark.parametrize(
    ("kind", "named"),
    [(OfGraph, "graph.losses"), (OfObject, "graph.meter.values"), (OfModule, f"{__name__}.LOSSES")],
)
def test_the_deque_is_named(kind: type[OfGraph], named: str) -> None:
    with pytest.raises(mg.CaptureError, match="in a way that no replay can repeat") as caught:
        kind()(X)
    assert f"into {named}, a deque, in" in caught.value.message
    hint = "return the tensor, and keep its number after the step"
    assert f"{hint}: {named}.append(loss.item()); build() may append() to a list" in caught.value.hint
    assert not LOSSES


def test_after_the_call_it_costs_nothing() -> None:
    class Returning(OfGraph):
        def build(self, x: torch.Tensor) -> Any:
            return x.square().mean()

    graph = Returning()
    for _ in range(5):
        graph.losses.append(graph(X).item())
    assert len(graph.builds) == 1
    assert list(graph.losses) == [1.0] * 3
