"""Factories for the proof of resuming: one that is right, and some with flaws."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import monograph as mg


class Train(mg.Graph):
    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        if loader is not None:
            self.register_state("loader", loader)

    def build(self, x, scale=1.0):
        loss = self.model(x).square().mean() * scale
        loss.backward()
        return {"loss": loss}


def numbers(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def right() -> tuple[mg.Graph, Any]:
    """Fewer batches than steps: epochs follow each other."""
    return Train(), [(numbers()[0], 2.0), {"x": numbers()[1]}, *numbers()[2:]]


def with_loader() -> tuple[mg.Graph, Any]:
    loader = StatefulDataLoader(torch.stack(numbers(20)).flatten(0, 1), batch_size=5, shuffle=True)
    return Train(loader), loader


def unregistered_loader() -> tuple[mg.Graph, Any]:
    """Its order comes from the random state, and so is another one after a restart."""
    return Train(), with_loader()[1]


CALLS = 0


class Counting(Train):
    """Scales each step by a count that no state has."""

    def __call__(self, x: torch.Tensor) -> Any:
        global CALLS
        CALLS += 1
        return super().__call__(x, 1.0 + CALLS)


def global_counter() -> tuple[mg.Graph, Any]:
    return Counting(), numbers()


class Noisy(Train):
    """Draws from Python's generator before each step."""

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x, random.random())


def python_random() -> tuple[mg.Graph, Any]:
    random.seed(0)
    return Noisy(), numbers()


class Recording(Train):
    """Counts in a dict, for which the state has no place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0, self: 0}

    def build(self, x, scale=1.0):
        self.seen["steps"] += 1
        return super().build(x, float(self.seen["steps"]))


def recording() -> tuple[mg.Graph, Any]:
    return Recording(), numbers()


def failing() -> tuple[mg.Graph, Any]:
    raise RuntimeError("the data is gone")


def no_batches() -> tuple[mg.Graph, Any]:
    return Train(), iter(numbers())


def three() -> Any:
    return Train(), numbers(), numbers()


def no_graph() -> Any:
    return numbers()
