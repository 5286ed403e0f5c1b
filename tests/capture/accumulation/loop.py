"""A mini-batch of several micro-batches, as one call of a graph and as the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg

CALLS = 4
BATCH = 12
Batch = tuple[Any, ...]


class Net(nn.Module):
    """BatchNorm, dropout, a counter that the forward moves, a frozen parameter and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop, self.unused = nn.Dropout(0.3), nn.Linear(2, 2)
        self.last.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def classes(generator: torch.Generator) -> Batch:
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(model(x), y)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=CALLS + 1)


@dataclass(frozen=True)
class Case:
    """`forward(model, *micro_batch)` gives the losses to call backward() on, and what is returned besides."""

    name: str
    model: Callable[[], nn.Module] = Net
    forward: Callable[..., Any] = lambda model, x, y: ([loss_of(model, x, y)], None)
    after: Callable[[nn.Module], Any] = lambda model: None  # once, on the summed gradients; is returned
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    batch: Callable[[torch.Generator], Batch] = classes
    steps: int = 4
    whole: frozenset[int] = field(default_factory=frozenset)  # positions of arguments that are no batch
    amp: torch.dtype | None = None
    scaled: bool = False
    average: bool = False
    builds: int = 1
    rows: tuple[int, ...] = ()  # of the batches, where they are not as `batch` makes them

    def __str__(self) -> str:
        return self.name


def clipped(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class TrainStep(mg.Graph):
    def __init__(self, case: Case, side: Side) -> None:
        super().__init__()
        self.model, self.forward, self.after = side.model, case.forward, case.after
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler)
        if side.scaler is not None:
            self.set_grad_scaler(side.scaler)
        if case.amp is not None:
            self.config.enable_amp(dtype=case.amp)
        if case.average:
            self.add_ema(self.model, 0.9)
        self.config.set_gradient_accumulation_steps(case.steps)

    def build(self, *batch):
        losses, more = self.forward(self.model, *batch)
        for index, loss in enumerate(losses):
            loss.backward(retain_graph=index + 1 < len(losses))
        return losses, more, self.after(self.model)


class Side:
    """A model with what trains it."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = case.model()
        self.optimizer = case.optimizer(self.model.parameters())
        self.scheduler = None if case.scheduler is None else case.scheduler(self.optimizer)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if case.scaled else None
        )

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
        }


def make_batches(case: Case) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    if not case.rows:
        return [case.batch(generator) for _ in range(CALLS)]
    return [with_rows(case, case.batch(generator), rows) for rows in case.rows]


def with_rows(case: Case, batch: Batch, rows: int) -> Batch:
    """A batch of another size."""
    return tuple(
        torch.cat([item] * -(-rows // len(item)))[:rows]
        if isinstance(item, torch.Tensor) and index not in case.whole
        else item
        for index, item in enumerate(batch)
    )


def plain_loop(case: Case) -> list[dict[str, Any]]:
    """What PyTorch alone does."""
    side = Side(case)
    average = torch.optim.swa_utils.AveragedModel(
        side.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    torch.manual_seed(1)
    trail = []
    for batch in make_batches(case):
        side.optimizer.zero_grad()
        returned = [plain_micro_step(case, side, micro) for micro in micro_batches(case, batch)]
        if side.scaler is not None:
            side.scaler.unscale_(side.optimizer)
        norm = case.after(side.model)
        if side.scaler is not None:
            side.scaler.step(side.optimizer)
            side.scaler.update()
        else:
            side.optimizer.step()
        if side.scheduler is not None:
            side.scheduler.step()
        average.update_parameters(side.model)
        trail.append({"returned": (*packed(returned), norm), **side.state()})
        if case.average:
            trail[-1]["average"] = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    return trail


def micro_batches(case: Case, batch: Batch) -> list[Batch]:
    columns = [
        item.chunk(case.steps)
        if isinstance(item, torch.Tensor) and index not in case.whole
        else [item] * case.steps
        for index, item in enumerate(batch)
    ]
    return list(zip(*columns, strict=True))


def plain_micro_step(case: Case, side: Side, micro: Batch) -> Any:
    with torch.autocast("cpu", dtype=case.amp or torch.bfloat16, enabled=case.amp is not None):
        losses, more = case.forward(side.model, *micro)
    for index, loss in enumerate(losses):
        part = loss / case.steps
        if side.scaler is not None:
            part = side.scaler.scale(part)
        part.backward(retain_graph=index + 1 < len(losses))
    return losses, more


def packed(items: list[Any]) -> Any:
    first = items[0]
    if isinstance(first, torch.Tensor):
        detached = [item.detach() for item in items]
        return torch.cat(detached) if first.dim() else torch.stack(detached)
    if isinstance(first, dict):
        return {key: packed([item[key] for item in items]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(packed(list(column)) for column in zip(*items, strict=True))
    return first


def detached(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach()
    if isinstance(item, dict):
        return {key: detached(entry) for key, entry in item.items()}
    return type(item)(map(detached, item)) if isinstance(item, (list, tuple)) else item


class Scaled(mg.Graph):
    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.model = nn.Linear(6, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.set_gradient_accumulation_steps(steps)

    def build(self, batch, scale=1.0):
        loss = (self.model(batch["x"]) * scale).square().mean()
        loss.backward()
        return loss


class Odd(mg.Graph):
    """A graph whose build() is given."""

    def __init__(
        self, build: Callable[..., Any], manual: bool = False, model: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.model = nn.Linear(6, 3) if model is None else model
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.add_optimizer(optimizer, manual=manual)
        self.body = build
        if manual:
            self.optimizer = optimizer
        self.config.set_gradient_accumulation_steps(2)

    def build(self, *batch):
        return self.body(self, *batch)
