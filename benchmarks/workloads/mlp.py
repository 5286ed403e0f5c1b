"""Small networks, where what surrounds the arithmetic costs most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workload import Batch, Update, Workload, class_targets

NUM_CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """Layers, their width, and samples in a batch."""

    depth: int
    width: int
    batch: int


def mlp64(*, smoke: bool) -> Workload:
    """Eight layers of 64, batches of 16."""
    return workload("mlp64", Sizes(depth=2, width=16, batch=4) if smoke else Sizes(8, 64, 16))


def mlp256(*, smoke: bool) -> Workload:
    """Six layers of 256, batches of 32."""
    return workload("mlp256", Sizes(depth=2, width=32, batch=4) if smoke else Sizes(6, 256, 32))


def workload(name: str, sizes: Sizes) -> Workload:
    """A classifier of vectors."""

    def make_batch(generator: torch.Generator) -> Batch:
        x = torch.randn(sizes.batch, sizes.width, generator=generator)
        return x, class_targets(sizes.batch, NUM_CLASSES, generator)

    return Workload(
        name=name,
        title=f"MLP, {sizes.depth} layers of {sizes.width} with LayerNorm and GELU, batch {sizes.batch}, AdamW",
        sizes=sizes,
        make_model=lambda: make_model(sizes),
        make_batch=make_batch,
        loss=F.cross_entropy,
        update=Update("adamw", lr=1e-3, weight_decay=0.01),
        jax_port="mlp",
    )


def make_model(sizes: Sizes) -> nn.Module:
    """Linear, LayerNorm, GELU, again and again, and a linear head."""
    layers: list[nn.Module] = []
    for _ in range(sizes.depth):
        layers += [nn.Linear(sizes.width, sizes.width), nn.LayerNorm(sizes.width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(sizes.width, NUM_CLASSES))
