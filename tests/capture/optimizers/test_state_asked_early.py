"""Code of a step that looks at the state of an optimizer, also before the step that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

Look = Callable[[torch.optim.Optimizer, torch.Tensor], Any]

LOOKS: dict[str, Look] = {
    "its length": lambda optimizer, _: len(optimizer.state),
    "its truth": lambda optimizer, _: bool(optimizer.state),
    "whether it has a parameter": lambda optimizer, weight: weight in optimizer.state,
    "get": lambda optimizer, weight: len(optimizer.state.get(weight, {})),
    "an entry": lambda optimizer, weight: len(optimizer.state[weight]),
    "a walk": lambda optimizer, _: sum(len(entries) for entries in optimizer.state.values()),
    "its names": lambda optimizer, _: len(optimizer.state_dict()["state"]),
    "its numbers": lambda optimizer, _: sum(entries["exp_avg"].sum() for entries in optimizer.state.values()),
}


class Step(mg.Graph):
    def __init__(self, look: Look) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.look = nn.Linear(4, 1), look
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.add_optimizer(optimizer)
        self.asked = (optimizer, self.model.weight)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean() * (1 + self.look(*self.asked))
        loss.backward()
        return loss


def _batch(number: int) -> torch.Tensor:
    return torch.full((2, 4), 1.0 + number)


def _eager(look: Look, steps: int) -> list[float]:
    """Plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(_batch(number)).square().mean() * (1 + look(optimizer, model.weight))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_build_finds_the_state_that_eager_mode_finds(look: Look):
    step = Step(look)
    assert [step(_batch(number)).item() for number in range(3)] == _eager(look, 3)
    assert len(step.builds) == 2


def test_compile_makes_no_state_that_build_finds():
    step, look = Step(LOOKS["its length"]), LOOKS["its length"]
    step.compile(_batch(0))
    assert [step(_batch(number)).item() for number in range(3)] == _eager(look, 3)


def test_verify_before_the_first_step_and_later():
    step = Step(LOOKS["its length"])
    for number in range(3):
        assert step.verify(_batch(number)).ok
        step(_batch(number))


def test_no_look_needs_no_second_build():
    step = Step(lambda _optimizer, _weight: 0)
    for number in range(3):
        step(_batch(number))
    assert len(step.builds) == 1
