"""A model of the zoo as data: what is trained, on what, and how. Nothing here knows Monograph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, OneCycleLR

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Training:
    """What stands around forward and backward: the optimizer, a clip, a schedule."""

    optimizer: Callable[..., torch.optim.Optimizer]
    clip: float | None = None
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None


@dataclass(frozen=True)
class Deviation:
    """Why a model does not train bit for bit as a graph, and how that shows."""

    kind: Literal["refused", "bits"]  # an error by name at capture, or other numbers than eager's
    cause: str  # upstream, in one sentence
    match: str  # found in the message of the error, or in the path of the first difference


@dataclass(frozen=True)
class ZooModel:
    """One row of the zoo. `loss(model, *batch)` is the forward with its loss; both sides call the same one."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[..., torch.Tensor]
    training: Training
    builds: int = 1
    deviation: Deviation | None = None

    def __str__(self) -> str:
        return f"{self.library}-{self.name}"


def warmup(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A linear warm-up over four steps: the learning rate of the first is 0.25 of the full one."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


ADAMW = Training(partial(torch.optim.AdamW, lr=1e-2))
ADAMW_WARMUP = Training(partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1), clip=1.0, schedule=warmup)
ADAMW_FOREACH = Training(partial(torch.optim.AdamW, lr=1e-2, foreach=True), clip=0.5)
SGD = Training(partial(torch.optim.SGD, lr=0.05, momentum=0.9))
SGD_DECAY = Training(
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    schedule=partial(ExponentialLR, gamma=0.5),
)
ADAM_CLIP = Training(partial(torch.optim.Adam, lr=1e-2), clip=0.1)
ADAM_CYCLE = Training(
    partial(torch.optim.Adam, lr=1e-2, amsgrad=True), schedule=partial(OneCycleLR, max_lr=1e-2, total_steps=8)
)
RMSPROP = Training(partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5))
