"""Tensors that were computed before a step: their values may be read, and no backward() of the step passes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.before: Any = None
        self.total: Any = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()


Body = Callable[["Step", torch.Tensor], torch.Tensor]


class Step(mg.Graph):
    def __init__(self, model: Model, body: Body) -> None:
        super().__init__()
        self.model, self.body = model, body
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.body(self, x)
        loss.backward()
        return loss


X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
FOUND: dict[str, Any] = {}


def _of_attribute(step: Step, x: torch.Tensor) -> torch.Tensor:
    return (step.model(x) + step.model.before).sum()


def _of_global(step: Step, x: torch.Tensor) -> torch.Tensor:
    return (step.model(x) + FOUND["before"]).sum()


def _stacked(step: Step, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([item.sum() for item in FOUND["list"]]).sum()


def _scalar(step: Step, x: torch.Tensor) -> torch.Tensor:
    return step.model(x).sum() * FOUND["scalar"]


@pytest.mark.parametrize("body", [_of_attribute, _of_global, _stacked, _scalar])
def test_a_backward_that_comes_to_one_is_an_error_that_says_so(body: Body) -> None:
    """Eager mode would go on there. Neither the parameters nor the values change."""
    model = Model()
    model.before = model(X)
    FOUND.update(before=model.before, list=[model(X), model(X)], scalar=model(X).sum())
    weight = model.layer.weight.detach().clone()
    step = Step(model, body)
    for _ in range(2):
        with pytest.raises(mg.GraphBoundaryError, match="computed before the step") as caught:
            step(X)
        assert "compute it in build()" in caught.value.hint
        assert "detach()" in caught.value.hint
        assert_same(weight, model.layer.weight.detach())


def _detached(step: Step, x: torch.Tensor) -> torch.Tensor:
    return (step.model(x) * FOUND["before"].detach()).sum()


def _without_gradients(step: Step, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = FOUND["before"].abs().max() + torch.stack([FOUND["scalar"], FOUND["scalar"]]).sum()
    return (step.model(x) * scale).sum()


def _summed_up(step: Step, x: torch.Tensor) -> torch.Tensor:
    loss = step.model(x).square().sum()
    step.model.total = step.model.total + loss
    return loss


@pytest.mark.parametrize("body", [_detached, _without_gradients, _summed_up])
def test_its_values_may_be_read(body: Body) -> None:
    model = Model()
    FOUND.update(before=model(X), scalar=model(X).sum())
    eager: Any = type("Eager", (), {})()
    eager.model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.model.parameters(), lr=0.1)
    step = Step(model, body)
    for _ in range(4):
        loss = body(eager, X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_same(loss.detach(), step(X).detach())
        assert_same(eager.model.total.detach(), model.total.detach())
    assert_same(eager.model.layer.weight.detach(), model.layer.weight.detach())


def test_it_may_be_read_where_nothing_is_trained() -> None:
    before = Model()(X)
    product = mg.trace(lambda x: x * before)
    with torch.no_grad():
        for _ in range(2):
            assert_same(product(X), X * before)
