"""A recommendation model (Naumov et al. 2019): tables of embeddings with dense gradients, and two small MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workload import Batch, Update, Workload


@dataclass(frozen=True)
class Sizes:
    """Tables, their rows and width, dense features, layers of the two MLPs, and samples in a batch."""

    tables: int
    rows: int
    width: int
    features: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int


def workload(*, smoke: bool) -> Workload:
    """Whether somebody clicks."""
    sizes = (
        Sizes(2, 20, 4, 3, (8,), (8,), 4) if smoke else Sizes(8, 10_000, 32, 13, (128, 64), (128, 64), 512)
    )

    def make_batch(generator: torch.Generator) -> Batch:
        dense = torch.randn(sizes.batch, sizes.features, generator=generator)
        ids = torch.randint(sizes.rows, (sizes.batch, sizes.tables), generator=generator)
        clicked = torch.randint(2, (sizes.batch,), generator=generator).float()
        return dense, ids, clicked

    return Workload(
        name="dlrm",
        title=f"DLRM, {sizes.tables} tables of {sizes.rows}x{sizes.width}, batch {sizes.batch}, AdamW",
        sizes=sizes,
        make_model=lambda: Recommender(sizes),
        make_batch=make_batch,
        loss=F.binary_cross_entropy_with_logits,
        update=Update("adamw", lr=1e-3, weight_decay=0.01),
        jax_port="dlrm",
    )


class Recommender(nn.Module):
    """Dense features and embeddings, their products in pairs, and a classifier of these."""

    pairs: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        vectors = sizes.tables + 1
        self.tables = nn.ModuleList(nn.Embedding(sizes.rows, sizes.width) for _ in range(sizes.tables))
        self.bottom = layers((sizes.features, *sizes.bottom, sizes.width))
        self.top = layers((sizes.width + vectors * (vectors - 1) // 2, *sizes.top, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = F.relu(self.bottom(dense))
        looked_up = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        vectors = torch.stack([first, *looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([first, products], dim=1))
        return logits.squeeze(1)


def layers(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    made: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        made += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*made[:-1])
