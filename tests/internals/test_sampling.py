"""A step that draws a batch from a buffer is told to take the batch as an argument."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import monograph as mg


def by_sample(buffer: Any) -> list[Tensor]:
    return random.sample(list(buffer), 2)


def by_choices(buffer: Any) -> list[Tensor]:
    return random.choices(buffer, k=2)


def by_numpy(buffer: Any) -> list[Tensor]:
    return [buffer[index] for index in np.random.choice(len(buffer), 2)]


class Replay(mg.Graph):
    def __init__(self, drawn: Callable[[Any], list[Tensor]], buffer: Any) -> None:
        super().__init__()
        self.drawn, self.buffer = drawn, buffer

    def build(self) -> Tensor:
        return torch.stack(self.drawn(self.buffer)).sum()


class Given(Replay):
    """As the advice says."""

    def build(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return batch.sum()


def new(count: int) -> Iterable[Tensor]:
    return [torch.randn(3) for _ in range(count)]


@pytest.mark.parametrize("drawn", [by_sample, by_choices, by_numpy])
@pytest.mark.parametrize("buffer", [list, lambda items: deque(items, maxlen=4)], ids=["grows", "is full"])
def test_the_batch_can_be_an_argument(drawn: Callable[[Any], list[Tensor]], buffer: Any) -> None:
    graph = Replay(drawn, buffer(new(4)))
    for _ in range(3):
        graph()
        graph.buffer.extend(new(2))
    assert len(graph.builds) == 3
    for build in graph.builds[1:]:
        assert "where build() draws from graph.buffer, as by random.sample()" in build.reason.advice
        assert "pass the batch as an argument" in build.reason.advice
        assert "last = torch.zeros" not in build.reason.advice


def test_a_batch_as_an_argument_has_one_build() -> None:
    graph = Given(by_sample, list(new(4)))
    for _ in range(3):
        graph(torch.stack(random.sample(graph.buffer, 2)))
        graph.buffer.extend(new(2))
    assert len(graph.builds) == 1
