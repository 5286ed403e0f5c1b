"""What is measured: a model, its loss, its optimizer and its batches, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]  # the last one is the target

NUM_BATCHES = 4
SEED = 0


@dataclass(frozen=True)
class Update:
    """An optimizer by its numbers, so that PyTorch and optax can both build it."""

    kind: str  # "adamw" or "sgd"
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Workload:
    """One training step. Nothing in it is random once the model and the batches are made."""

    name: str
    title: str
    sizes: Any  # a frozen dataclass, which the JAX port reads too
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    update: Update
    jax_port: str | None  # the module of benchmarks.jax_ports that says the same in JAX
    has_images: bool = False  # then the layout of the channels is a setting


def seeded_model(workload: Workload) -> nn.Module:
    """The model with the weights that every competitor begins with."""
    torch.manual_seed(SEED)
    return workload.make_model()


def seeded_batches(workload: Workload) -> list[Batch]:
    """The batches that every competitor trains on, in turn."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [workload.make_batch(generator) for _ in range(NUM_BATCHES)]


def class_targets(count: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """One class for each sample."""
    return torch.randint(num_classes, (count,), generator=generator)
