"""What is done in some steps only: two builds by a flag, or none where it is done between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

X = torch.ones(4, 3)


class Copying(mg.Graph):
    def __init__(self, *, every: int = 0) -> None:
        super().__init__()
        self.net, self.target = nn.Linear(3, 1), nn.Linear(3, 1)
        self.add_optimizer(torch.optim.SGD(self.net.parameters(), lr=0.1))
        self.every, self.steps, self.copies = every, 0, False

    def build(self, x: torch.Tensor, copies: Any = False) -> torch.Tensor:
        loss = (self.net(x) - self.target(x).detach()).square().mean()
        loss.backward()
        self.steps += 1
        if self.copies or copies or (self.every and self.steps % self.every == 0):
            self.target.load_state_dict(self.net.state_dict())
        return loss


def by_argument(graph: Copying, step: int) -> None:
    graph(X, step % 3 == 0)


def by_tensor(graph: Copying, step: int) -> None:
    graph(X, torch.tensor(step % 3 == 0))


def by_attribute(graph: Copying, step: int) -> None:
    graph.copies = step % 3 == 0
    graph(X)


def by_counter(graph: Copying, _step: int) -> None:
    graph(X)


@pytest.mark.parametrize(
    ("call", "every", "values"),
    [
        (by_argument, 0, "torch.where(it, a, b) chooses between values"),
        (by_tensor, 0, "torch.where(condition, a, b) for a branch"),
        (by_attribute, 0, "torch.where(it, a, b) chooses between values"),
        (by_counter, 3, "torch.where(condition, a, b) has one for both, where it chooses between values"),
    ],
)
def test_the_advice_names_both_cases(call: Callable[[Copying, int], None], every: int, values: str) -> None:
    graph = Copying(every=every)
    for step in range(7):
        call(graph, step)
    assert len(graph.builds) == 2
    assert values in graph.builds[1].reason.advice
    assert (
        "what is done now and then, such as target.load_state_dict(...), can have two builds, by an argument that is True or "
        "False, or be done between two calls" in graph.builds[1].reason.advice
    )


def test_between_two_calls_it_has_one_build() -> None:
    graph, counting = Copying(), Copying(every=3)
    counting.net.load_state_dict(graph.net.state_dict())
    counting.target.load_state_dict(graph.target.state_dict())
    for step in range(1, 8):
        graph(X)
        if step % 3 == 0:
            graph.target.load_state_dict(graph.net.state_dict())
        counting(X)
    assert len(graph.builds) == 1
    for name, value in counting.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, graph.state_dict()[name])
