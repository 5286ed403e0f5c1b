"""A scheduler that build() steps is named, with what to write instead, which has one build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import monograph as mg

INSTEAD = (
    "step the scheduler after the call, or give it to add_optimizer(optimizer, manual=True, lr_sch=scheduler)"
)
X = torch.ones(4, 3)


class Step(mg.Graph):
    def __init__(self, made: Callable[[Any], Any], way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.way = nn.Linear(3, 1), way
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.scheduler = made(optimizer)
        self.add_optimizer(optimizer, manual=True, lr_sch=self.scheduler if way == "given" else None)
        self.optimizer = optimizer

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


class Inside(Step):
    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().build(x)
        self.scheduler.step()
        return loss


MADE: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[2],
    ),
}


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("name", MADE)
def test_the_advice_is_about_the_scheduler(name: str, caplog: pytest.LogCaptureFixture) -> None:
    graph = Inside(MADE[name], "inside")
    for _ in range(4):
        graph(X)
    assert len(graph.builds) == 4
    for build in graph.builds[1:]:
        assert "build() steps graph.scheduler, and has a build for each step of it" in build.reason.advice
        assert INSTEAD in build.reason.advice
    assert len([record for record in caplog.records if ": build " in record.getMessage()]) == 1


@pytest.mark.parametrize("name", MADE)
def test_what_to_write_has_one_build(name: str) -> None:
    after, given = Step(MADE[name], "after"), Step(MADE[name], "given")
    for _ in range(4):
        loss = after(X)
        after.scheduler.step()
        assert torch.equal(given(X), loss)
    assert len(after.builds) == len(given.builds) == 1


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_one_that_changes_a_tuple_is_refused_with_the_same_words() -> None:
    graph = Inside(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20), "inside")
    with pytest.raises(mg.OptimizerError, match=r"changes the tuple optimizer\.0/group0/betas") as caught:
        graph(X)
    assert INSTEAD in caught.value.hint
