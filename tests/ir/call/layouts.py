"""Steps on arguments that share memory, as plain PyTorch and as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import monograph as mg

Body = Callable[..., Any]


class Step(mg.Graph):
    """A body as a graph, with what it holds."""

    def __init__(self, body: Body, optimizer: torch.optim.Optimizer | None = None, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)
        self.body = body
        if optimizer is not None:
            self.add_optimizer(optimizer)

    def build(self, *args: Any) -> Any:
        return self.body(self, *args)


def numbers(count: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count).to(dtype)


def add_to_first(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a + b


def only_read(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * 2 + b


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss
