"""The small GPT of the examples: matrix products, attention, and a large vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workload import Batch, Update, Workload
from examples.models.gpt import GPT


@dataclass(frozen=True)
class Sizes:
    """Layers, width, heads, words, and the shape of a batch."""

    depth: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int


def workload(*, smoke: bool) -> Workload:
    """A language model on random tokens."""
    sizes = Sizes(1, 32, 2, 64, 2, 8) if smoke else Sizes(4, 256, 8, 4096, 8, 128)

    return Workload(
        name="gpt",
        title=f"GPT, {sizes.depth} layers, {sizes.width} wide, {sizes.heads} heads, {sizes.batch}x{sizes.length} tokens, "
        f"vocabulary {sizes.vocabulary}, AdamW",
        sizes=sizes,
        make_model=lambda: make_model(sizes),
        make_batch=lambda generator: random_text(sizes.vocabulary, sizes.batch, sizes.length, generator),
        loss=token_loss,
        update=Update("adamw", lr=3e-4, weight_decay=0.01),
        jax_port="gpt",
    )


def make_model(sizes: Sizes) -> nn.Module:
    """The network without dropout."""
    return GPT(
        sizes.vocabulary,
        context=sizes.length,
        width=sizes.width,
        num_layers=sizes.depth,
        num_heads=sizes.heads,
        dropout=0.0,
    )


def random_text(vocabulary: int, batch: int, length: int, generator: torch.Generator) -> Batch:
    """Random tokens, and for each the one that follows."""
    text = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all tokens of all texts."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
