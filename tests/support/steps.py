"""The smallest graphs, models and optimizers, and lines of a test's own file that carry a mark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import monograph as mg
from tests.support import Side


def graph(build: Callable[..., Any], **attributes: Any) -> mg.Graph:
    """A graph with this build() and these attributes."""
    step = type("Step", (mg.Graph,), {"build": build})()
    for name, value in attributes.items():
        setattr(step, name, value)
    return step


class TrainStep(mg.Graph):
    """The step of one side of a comparison; `loss_of(model, *batch)` is the forward with its loss."""

    def __init__(self, side: Side, loss_of: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = side.model, loss_of
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler)

    def build(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss_of(self.model, *batch)
        loss.backward()
        return loss


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def detached(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().clone()
    if isinstance(item, (list, tuple)):
        return [detached(entry) for entry in item]
    return item


def line_of(mark: str, file: str) -> int:
    """The line of a file that ends with the comment `# at: mark`."""
    lines = enumerate(Path(file).read_text().splitlines(), 1)
    (found,) = (number for number, line in lines if line.endswith(f"  # at: {mark}"))
    return found
