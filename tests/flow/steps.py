"""A small model, graphs over it by OneFlow's names, and the plain loop of PyTorch that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

import monograph.flow.nn as nn
from monograph.errors import MonographError


def net(seed: int = 0) -> torch.nn.Sequential:
    """Two layers, with the same numbers each time."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def batches(count: int, rows: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(rows, 3, generator=generator) for _ in range(count)]


def loss_of(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return functional.smooth_l1_loss(model(x), torch.ones(len(x), 2))


class TrainStep(nn.Graph):
    """The usual step: forward, loss, backward, update."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, lr_sch: Any = None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=lr_sch)

    def build(self, x):
        loss = loss_of(self.model, x)
        loss.backward()
        return loss


def graph(build: Callable[..., Any], optimizer: Any = None, **attributes: Any) -> nn.Graph:
    """A graph with this build() and these attributes."""
    made = type("Step", (nn.Graph,), {"build": build})()
    for name, value in attributes.items():
        setattr(made, name, value)
    if optimizer is not None:
        made.add_optimizer(optimizer)
    return made


def infer(model: Any) -> nn.Graph:
    """A graph of the model alone."""
    return graph(lambda self, x: self.model(x), model=model)


def sgd(model: torch.nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    """PyTorch's own SGD: the reference, and an optimizer that a graph takes as well."""
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def plain(
    model: torch.nn.Module, optimizer: Any, data: Iterable[torch.Tensor], lr_sch: Any = None
) -> list[torch.Tensor]:
    """The losses of the plain loop."""
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        if lr_sch is not None:
            lr_sch.step()
        losses.append(loss.detach())
    return losses


def trained(step: nn.Graph, data: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The losses of a graph."""
    return [step(x).detach() for x in data]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def check_told(error: BaseException, *parts: str, hint: str) -> None:
    """The error says what it is about, points to the test's line, and tells a way out."""
    assert isinstance(error, MonographError)
    for part in parts:
        assert part in error.message, f"{part!r} is not in:\n{error}"
    assert hint in error.hint, f"{hint!r} is not in the hint of:\n{error}"
    assert "tests/flow/" in error.where.file, error.where
