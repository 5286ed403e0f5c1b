"""Optimizers as data: a kind, its options, and how many builds its steps may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import (
    Muon,
    Optimizer,
)

from tests.support.small import (
    Classifier,
    Matrices,
    one_thread,  # noqa: F401
)


@dataclass(frozen=True)
class Row:
    """One configuration; `builds` is how many the six steps need."""

    kind: type[Optimizer]
    options: dict[str, Any]
    builds: int = 1
    groups: Callable[[nn.Module], Any] = nn.Module.parameters

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.kind.__name__}({options}){'' if self.groups is nn.Module.parameters else '-' + self.groups.__name__}"

    @property
    def model(self) -> type[nn.Module]:
        return Matrices if self.kind is Muon else Classifier

    def make(self, model: nn.Module) -> Optimizer:
        options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return self.kind(self.groups(model), **options)


class Lion(Optimizer):
    """Signs of a mix of gradient and momentum; the momentum is changed in place."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self.update(parameter, self.state[parameter], group)

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        direction = state["momentum"].mul(first).add_(parameter.grad, alpha=1 - first).sign_()
        parameter.add_(direction, alpha=-group["lr"])
        state["momentum"].mul_(second).add_(parameter.grad, alpha=1 - second)


class LionWithCounter(Lion):
    """A step counter that is a Python int, used in the formula."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        correction = 1 - second ** state["step"]
        state["momentum"].mul_(second).add_(parameter.grad, alpha=1 - second)
        direction = (state["momentum"] / correction).mul_(first).add_(parameter.grad, alpha=1 - first)
        parameter.add_(direction.sign_(), alpha=-group["lr"])
