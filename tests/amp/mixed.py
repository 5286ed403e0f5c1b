"""Mixed precision, clipping keys and averages as data: plain PyTorch on one side, a Graph on the other.

The plain side is written as torch's own recipes are: `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)`
before gradients are changed, `scaler.step(optimizer)`, `scaler.update()`, `AveragedModel.update_parameters(model)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import monograph as mg
from monograph.internals.internals import internals_of
from tests.support import assert_same

STEPS = 6
KEYS = ("clip_grad_max_norm", "clip_grad_norm_type", "lr_scale")
Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(nn.Module):
    """Buffers, dropout, and parameters of one and of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


class Matrices(nn.Module):
    """Only parameters of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def growing() -> torch.amp.GradScaler:
    """A scale that has no exact inverse and moves within a few steps."""
    return torch.amp.GradScaler("cpu", init_scale=1000.0, growth_factor=1.5, growth_interval=2)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def infinite_at(*steps: int, count: int = STEPS) -> list[Batch]:
    """Batches; in those `steps` an input is infinite, and so are gradients."""
    generator = torch.Generator().manual_seed(3)
    made = [
        (torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator))
        for _ in range(count)
    ]
    for step in steps:
        made[step][0][0, 0] = float("inf")
    return made


@dataclass
class Side:
    """What is trained on one side of a comparison, and what trains it."""

    model: nn.Module
    optimizer: Optimizer
    scaler: Any = None
    scheduler: Any = None
    average: Any = None

    def state(self) -> dict[str, Any]:
        """Everything that a step changes, copied."""
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "average": copy.deepcopy(self.average.state_dict()) if self.average is not None else None,
            "rng": torch.get_rng_state(),
        }


Between = Callable[[int, Side], None]


@dataclass(frozen=True)
class Recipe:
    """How a step is made, for both sides. `unscaled(model)` is what build() does between backward and the update."""

    optimizer: Callable[[nn.Module], Optimizer] = adamw
    model: Callable[[], nn.Module] = Classifier
    loss: Callable[..., torch.Tensor] = cross_entropy
    scaler: Callable[[], Any] | None = None
    amp: torch.dtype | None = None
    unscaled: Callable[[nn.Module], None] | None = None
    scheduler: Callable[[Optimizer], Any] | None = None
    decay: Any = None  # of an average, a number or a function of the number of updates

    def side(self) -> Side:
        torch.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer(model)
        return Side(
            model,
            optimizer,
            self.scaler and self.scaler(),
            self.scheduler and self.scheduler(optimizer),
        )


class Step(mg.Graph):
    """The step of a recipe as a user writes it: nothing in build() knows of a scaler or of autocast."""

    def __init__(self, recipe: Recipe, side: Side) -> None:
        super().__init__()
        self.model, self.recipe = side.model, recipe
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler)
        if side.scaler is not None:
            self.set_grad_scaler(side.scaler)
        if recipe.amp is not None:
            self.config.enable_amp(dtype=recipe.amp)
        if recipe.decay is not None:
            self.add_ema(self.model, recipe.decay)
            side.average = internals_of(self).registry.averages[0]

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.recipe.loss(self.model, x, y)
        loss.backward()
        if self.recipe.unscaled is not None:
            self.recipe.unscaled(self.model)
        return loss


def plain_step(recipe: Recipe, side: Side, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step by torch alone."""
    scaler = side.scaler or torch.amp.GradScaler("cpu", enabled=False)
    side.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=recipe.amp or torch.bfloat16, enabled=recipe.amp is not None):
        loss = recipe.loss(side.model, x, y)
    scaler.scale(loss).backward()
    groups = side.optimizer.param_groups
    if recipe.unscaled is not None or any(group.get(KEYS[0]) is not None for group in groups):
        scaler.unscale_(side.optimizer)
    if recipe.unscaled is not None:
        recipe.unscaled(side.model)
    for group in groups:
        if group.get(KEYS[0]) is not None:
            nn.utils.clip_grad_norm_(group["params"], group[KEYS[0]], group.get(KEYS[1], 2.0))
    rates = [group["lr"] for group in groups]
    for group in groups:
        if group.get(KEYS[2]) is not None:
            group["lr"] = group["lr"] * group[KEYS[2]]
    scaler.step(side.optimizer)
    scaler.update()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    if side.scheduler is not None:
        side.scheduler.step()
    if side.average is not None:
        side.average.update_parameters(side.model)
    return loss


def plain_trail(recipe: Recipe, batches: Iterable[Batch], between: Between | None = None) -> list[Any]:
    """The loss and everything else after each step of plain PyTorch; `between` runs after the record is taken."""
    side = recipe.side()
    if recipe.decay is not None:
        side.average = averaged(side.model, recipe.decay)
    return trail(side, lambda x, y: plain_step(recipe, side, x, y), batches, between)


def averaged(model: nn.Module, decay: float | Callable[[int], float]) -> AveragedModel:
    """torch's average, with its own rule for a number, and as a user writes it for a function."""
    if not callable(decay):
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def update(averages: list[torch.Tensor], current: list[torch.Tensor], updates: torch.Tensor) -> None:
        torch._foreach_lerp_(averages, current, 1 - decay(int(updates)))

    return AveragedModel(model, multi_avg_fn=update)


def after(index: int, change: Callable[[Side], Any]) -> Between:
    """A change of a side when one step is done."""
    return lambda at, side: change(side) if at == index else None


def trail(
    side: Side,
    step: Callable[..., torch.Tensor],
    batches: Iterable[Batch],
    between: Between | None = None,
) -> list[Any]:
    """The loss and everything else after each step."""
    torch.manual_seed(1)
    made = []
    for index, batch in enumerate(batches):
        made.append({"loss": step(*batch).detach().clone(), **side.state()})
        if between is not None:
            between(index, side)
    return made


def check(
    recipe: Recipe,
    batches: list[Batch] | None = None,
    between: Between | None = None,
    *,
    builds: int | None = 1,
    eager: bool = True,
) -> Step:
    """Train by plain PyTorch, by the graph, and by its eager(): all is the same after every step.

    Where plain PyTorch has no optimizer state yet, because every step was skipped so far, the graph may have the
    state that the first step would begin with.
    """
    batches = batches if batches is not None else infinite_at()
    expected = plain_trail(recipe, batches, between)
    if eager:
        side = recipe.side()
        graph = Step(recipe, side)
        assert_same(expected, trail(side, graph.eager, batches, between), "eager step")
    side = recipe.side()
    graph = Step(recipe, side)
    got = trail(side, graph, batches, between)
    for index, (plain, ours) in enumerate(zip(expected, got, strict=True)):
        if not plain["optimizer"]["state"]:
            ours["optimizer"]["state"] = {}
        assert_same(plain, ours, f"step {index}")
    assert builds in (None, len(graph.builds)), graph.explain()
    return graph
