"""A parity case as data, and the one runner: plain PyTorch on one side, a Graph on the other, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import monograph as mg
from tests.support import Side, assert_same, train_eagerly

STEPS = 5
Batch = tuple[Any, ...]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def nothing(*_args: Any) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """What is trained and how. The same functions serve both sides; they never see Monograph."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[..., torch.Tensor]  # loss(model, *batch)
    before_update: Callable[[nn.Module], None] = nothing  # clipping
    between: Callable[[nn.Module, int], None] = nothing  # outside of the step, after it: freezing
    also: Callable[[nn.Module], Any] = nothing  # what else a step leaves: attributes that are no state
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    builds: int | None = 1  # None where each step may make one

    def __str__(self) -> str:
        return self.name


def make_side(case: Case) -> Side:
    torch.manual_seed(0)
    model = case.model()
    return Side(model, case.optimizer(model.parameters()))


def make_batches(case: Case, count: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [case.batch(generator) for _ in range(count)]


class TrainStep(mg.Graph):
    """The step of a case as a user writes it."""

    def __init__(self, case: Case, side: Side) -> None:
        super().__init__()
        self.model = side.model
        self.loss = case.loss
        self.before_update = case.before_update
        self.add_optimizer(side.optimizer)

    def build(self, *batch):
        loss = self.loss(self.model, *batch)
        loss.backward()
        self.before_update(self.model)
        return loss


def check(case: Case) -> TrainStep:
    """Train both sides on the same fresh batches; everything is the same after each step."""
    eager, graph = make_side(case), make_side(case)
    also: list[Any] = []

    def after(index: int, _loss: torch.Tensor) -> None:
        also.append(_copied(case.also(eager.model)))
        case.between(eager.model, index)

    torch.manual_seed(1)
    expected = train_eagerly(eager, case.loss, make_batches(case), after, before_update=case.before_update)
    step = TrainStep(case, graph)
    torch.manual_seed(1)
    for index, batch in enumerate(make_batches(case)):
        loss = step(*batch)
        assert_same(also[index], case.also(graph.model), f"step {index}")
        case.between(graph.model, index)
        assert_same(expected[index], {"loss": loss, **graph.state()}, f"step {index}")
    assert case.builds in (None, len(step.builds)), step.explain()
    return step


def _copied(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().clone()
    if isinstance(item, (list, tuple)):
        return type(item)(map(_copied, item))
    return item
