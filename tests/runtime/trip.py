"""A training step that fails where it is told to, and all that it could leave changed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import monograph as mg


class Own(Exception):
    """An exception of the user's own."""


@dataclass
class Trip:
    """Where build() fails, and by what."""

    at: str = ""
    error: BaseException | None = None

    def __call__(self, here: str) -> None:
        torch.set_grad_enabled(torch.is_grad_enabled())  # functions of torch that look at all that is around
        if self.at == here:
            raise self.error


class Model(nn.Module):
    """A bit of everything that a capture touches."""

    def __init__(self, trip: Trip) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3, bias=False)
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.ones(6)
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"a": 1}
        self.last: Any = None
        self.note = "before"
        self.trip = trip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.fc(x)).relu()) * self.scale.clone()
        self.count = self.count + 1
        self.scale.mul_(1.01)
        self.last = hidden.detach()
        self.fresh = hidden.detach() * 2
        self.note = "after"
        if self.trip.at:
            self.history.append(hidden)
            self.table["hidden"] = hidden
        self.trip("in forward")
        return self.head(hidden)


class TrippedAdam(torch.optim.AdamW):
    """Fails in the middle of its step: some parameters are updated, the rest are not."""

    def __init__(self, parameters: Any, trip: Trip) -> None:
        super().__init__(parameters, lr=0.05, foreach=False)
        self.trip = trip

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._init_group(*args, **kwargs)
        self.trip("in step")
        return made


@dataclass
class Side:
    """The same things for plain PyTorch and for a graph."""

    trip: Trip
    model: Model
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: Any = None
    calls: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Everything that a step changes, cloned."""
        return {
            "model": {name: t.clone() for name, t in self.model.state_dict().items()},
            "scale": self.model.scale.clone(),
            "last": None if self.model.last is None else self.model.last.clone(),
            "optimizer": [
                {k: v.clone() for k, v in entries.items()} for entries in self.optimizer.state.values()
            ],
            "lr": self.optimizer.param_groups[0]["lr"],
            "epoch": self.scheduler.last_epoch,
            "rng": torch.get_rng_state(),
        }


def body(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    trip = self.trip
    trip("at start")
    if trip.at:
        disturb(self)
    loss = functional.cross_entropy(self.model(x), y)
    trip("after forward")
    loss.backward()
    if trip.at == "after backward":
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
    trip("after backward")
    return loss


def disturb(self: Any) -> None:
    """What a build() may do to the world before it fails."""
    random.random()
    np.random.rand()
    self.model.register_forward_hook(lambda module, args, out: out)
    self.model.fc.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    self.model.fc.weight.register_hook(lambda gradient: gradient)
    self.model.dropout.p = 0.9
    self.model.extra = nn.Linear(2, 2)
    self.model.norm.eval()
    self.optimizers[0].param_groups[0]["weight_decay"] = 7.0
    self.optimizers[0].zero_grad()


def make_side(graph: bool) -> Side:
    torch.manual_seed(0)
    trip = Trip()
    model = Model(trip)
    optimizer = TrippedAdam(model.parameters(), trip)
    side = Side(trip, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
    if graph:
        step = type("Step", (mg.Graph,), {"build": body})()
        step.model, step.trip = model, trip
        step.add_optimizer(optimizer, lr_sch=side.scheduler)
        step.optimizers = [optimizer]
        side.step = step
    else:

        class Plain:
            pass

        plain = Plain()
        plain.model, plain.trip, plain.optimizers = model, trip, [optimizer]

        def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = body(plain, x, y)
            optimizer.step()
            optimizer.zero_grad()
            side.scheduler.step()
            return loss

        side.step = call
    return side


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def call(side: Side, index: int) -> dict[str, Any]:
    torch.manual_seed(100 + index)
    loss = side.step(*batch(index))
    return {"loss": loss.detach().clone(), **side.values()}


@pytest.fixture(autouse=True)
def _captured_once():
    """The first capture of a process imports parts of torch, which are then there to stay."""
    step = type("Step", (mg.Graph,), {"build": lambda self, x: x + 1})()
    step(torch.ones(1))
    random.seed(1)
    np.random.seed(1)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
