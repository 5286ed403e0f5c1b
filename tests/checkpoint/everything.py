"""A graph that holds one of everything that has state, and a picture of all of it: values and identities."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

import monograph as mg
from monograph.internals.internals import internals_of


class Model(nn.Module):
    """Parameters, buffers of both kinds, an attribute that steps set, extra state, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.hidden: Any = (torch.zeros(5, 3), torch.zeros(5, 3))
        self.table = {"seen": [1, 2]}
        self.generator = torch.Generator().manual_seed(5)

    def get_extra_state(self) -> Any:
        return self.table

    def set_extra_state(self, state: Any) -> None:
        self.table["seen"] = dict(state)["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x) * torch.rand(5, 3, generator=self.generator)
        self.mean = self.mean * 0.9 + y.detach().mean(0)
        self.hidden = ((self.hidden[0] + y).tanh().detach(), self.hidden[1] * 0.5)
        return y + self.mean + self.hidden[0]


class Factor:
    """A learning-rate function with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**step


class Counter:
    """A registered object that changes what it has in place, and complains late."""

    def __init__(self) -> None:
        self.counts, self.weights = {"a": [0]}, torch.zeros(2)
        self.error: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.random(), torch.rand(1), np.random.rand()
        self.counts["a"][:] = state["counts"]["a"]
        self.counts["new"] = 1
        self.weights.copy_(state["weights"])
        if self.error is not None:
            raise self.error


class Everything(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.critic = Model(), nn.Linear(3, 1)
        groups = [
            {"params": self.model.layers[0].parameters(), "lr": torch.tensor(0.01)},
            {"params": self.model.layers[1:].parameters(), "lr": torch.tensor(0.02), "amsgrad": True},
        ]
        first = torch.optim.AdamW(groups)
        schedules = [LambdaLR(first, Factor()), ExponentialLR(first, 0.9)]
        second = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.add_optimizer(first, lr_sch=SequentialLR(first, schedules, milestones=[2]))
        self.add_optimizer(second)
        self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        self.add_ema(self.critic, 0.9)
        self.config.keep_gradients()
        self.noise = torch.Generator().manual_seed(1)
        self.counter = Counter()
        self.register_state("counter", self.counter)
        self.register_state("head", nn.Linear(2, 2))

    def build(self, x):
        loss = self.critic(self.model(x + torch.rand(5, 4, generator=self.noise))).square().mean()
        loss.backward()
        return loss


def inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def make() -> Everything:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return Everything()


def picture(graph: Everything) -> dict[str, Any]:
    """By path the identity of each object with state, and a copy of its value."""
    found: dict[str, Any] = {}
    roots = {
        "model": graph.model.to(nn.Module),
        "critic": graph.critic.to(nn.Module),
        "optimizers": [held.optimizer for held in internals_of(graph).registry.optimizers],
        "schedulers": [internals_of(graph).registry.optimizers[0].scheduler],
        "registered": list(internals_of(graph).registry.registered.values()),
        "scaler": internals_of(graph).registry.scaler,
        "averages": list(internals_of(graph).registry.averages),
        "steps": internals_of(graph).store.steps,
        "known": internals_of(graph).registry.known_tensors,
    }
    found["random"] = (
        torch.get_rng_state(),
        random.getstate(),
        [repr(item) for item in np.random.get_state()],
    )
    for path, item in _walk(roots, "", set()):
        if isinstance(item, torch.Tensor):
            grad = None if item.grad is None or not item.is_leaf else item.grad.clone()
            found[path] = (
                id(item),
                type(item),
                item.detach().clone(),
                grad,
                item.grad is not None and id(item.grad),
            )
        elif isinstance(item, torch.Generator):
            found[path] = (id(item), item.get_state())
        else:
            found[path] = (
                item
                if isinstance(item, (str, int, float, type(None), torch.dtype))
                else (id(item), type(item))
            )
    return found


def _walk(item: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(item) in seen and not isinstance(item, (str, int, float)):
        return
    seen.add(id(item))
    if path.count("/") > 1 or not isinstance(item, (dict, list, tuple)):
        yield path, item
    if isinstance(item, (torch.Tensor, torch.Generator, type, str, int, float)) or (
        callable(item) and not hasattr(item, "__dict__")
    ):
        return
    if isinstance(item, dict):
        entries: Any = [
            (str(key) if not isinstance(key, torch.Tensor) else str(n), value)
            for n, (key, value) in enumerate(item.items())
        ]
    elif isinstance(item, (list, tuple)):
        entries = list(enumerate(item))
    else:
        entries = list(getattr(item, "__dict__", {}).items())
    for key, value in entries:
        yield from _walk(value, f"{path}/{key}", seen)
