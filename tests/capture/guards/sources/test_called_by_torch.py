"""Python of the step's that functions of torch call counts too, though what looks at these functions does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

SETTINGS = {"scale": 1, "place": 1}
X = torch.arange(6.0).reshape(2, 3)


class Place:
    """An index that C code asks for."""

    def __index__(self) -> int:
        return SETTINGS["place"]


class Scaled(torch.autograd.Function):
    """Scales, and by the same in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * SETTINGS["scale"]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * SETTINGS["scale"]


def by_index(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight * x[:, Place()].sum()


def by_function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = Scaled.apply(weight)
    return made * x.sum()


def by_hook(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    doubled = weight * 2
    doubled.register_hook(lambda gradient: gradient * SETTINGS["scale"])
    return doubled * x.sum()


class Layer(nn.Module):
    """A layer whose forward a function of torch calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scaled input."""
        return x * SETTINGS["scale"]


LAYERS = nn.Sequential(nn.Sequential(Layer()), Layer())


def by_checkpoint(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made: Any = torch.utils.checkpoint.checkpoint(LAYERS, weight, use_reentrant=False)
    return made * x.sum()


class Step(mg.Graph):
    """The gradient of what `make` gives."""

    def __init__(self, make: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.make = nn.Linear(1, 1), make
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        loss = self.make(self.model.weight, x).sum() + self.model.bias.sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("make", [by_index, by_function, by_hook, by_checkpoint])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_only_called_code_reads(
    make: Callable[..., torch.Tensor], name: str, monkeypatch: pytest.MonkeyPatch
):
    step, plain = Step(make), Step(make)
    sgd = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    for value in (1, 1, 2, 2, 0):
        monkeypatch.setitem(SETTINGS, name, value)
        sgd.zero_grad()
        loss = plain.build(X)
        sgd.step()
        assert torch.equal(step(X), loss)
        assert all(map(torch.equal, step.model.parameters(), plain.model.parameters()))
