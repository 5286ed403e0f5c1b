"""Where optimizers take ops on lists if nothing is said, as they do on accelerators, a graph takes them too."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import Side, assert_same, train_eagerly
from tests.support.steps import TrainStep

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.fixture
def lists_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's optimizers treat CPUs as it treats accelerators."""
    module = import_module("torch.optim.optimizer")
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def side(make: Callable[[Any], torch.optim.Optimizer]) -> Side:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return Side(model, make(model.parameters()))


@pytest.mark.usefixtures("lists_on_cpus")
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_update_is_of_lists(name: str) -> None:
    plain, traced = side(OPTIMIZERS[name]), side(OPTIMIZERS[name])
    batches = [(torch.randn(3, 4),) for _ in range(3)]
    expected = train_eagerly(plain, mean_square, batches)
    step = TrainStep(traced, mean_square)
    for number, batch in enumerate(batches):
        got = {"loss": step(*batch).detach(), **traced.state()}
        assert_same(expected[number], got, f"step {number}")
    assert "_foreach_" in str(step.show())


def test_elsewhere_it_is_of_single_tensors() -> None:
    step = TrainStep(side(OPTIMIZERS["Adam"]), mean_square)
    step(torch.randn(3, 4))
    assert "_foreach_" not in str(step.show())
