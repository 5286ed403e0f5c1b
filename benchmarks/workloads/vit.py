"""A vision transformer of the width of ViT-Tiny (Touvron et al. 2020) on small images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workload import Batch, Update, Workload, class_targets

NUM_CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """Layers, width, heads, and the shape of a batch."""

    depth: int
    width: int
    heads: int
    batch: int
    side: int
    patch: int


def workload(*, smoke: bool) -> Workload:
    """A classifier of 32x32 images in patches of 4x4."""
    sizes = Sizes(1, 32, 2, 2, 8, 4) if smoke else Sizes(6, 192, 3, 32, 32, 4)

    def make_batch(generator: torch.Generator) -> Batch:
        x = torch.randn(sizes.batch, 3, sizes.side, sizes.side, generator=generator)
        return x, class_targets(sizes.batch, NUM_CLASSES, generator)

    return Workload(
        name="vit-tiny",
        title=f"ViT, {sizes.depth} layers, {sizes.width} wide, {sizes.heads} heads, {sizes.batch} images of "
        f"{sizes.side}x{sizes.side}, patches of {sizes.patch}x{sizes.patch}, AdamW",
        sizes=sizes,
        make_model=lambda: VisionTransformer(sizes),
        make_batch=make_batch,
        loss=F.cross_entropy,
        update=Update("adamw", lr=3e-4, weight_decay=0.05),
        jax_port="vit",
    )


class Layer(nn.Module):
    """Attention, then two linear layers; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        narrowed: Tensor = self.narrow(F.gelu(self.wide(self.norm2(x))))
        return x + narrowed

    def attention(self, x: Tensor) -> Tensor:
        """Every patch looks at every patch."""
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class VisionTransformer(nn.Module):
    """Patches as tokens beside a class token, whose last state is classified."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        num_patches = (sizes.side // sizes.patch) ** 2
        self.patches = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, sizes.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, num_patches + 1, sizes.width) * 0.02)
        self.layers = nn.Sequential(*(Layer(sizes.width, sizes.heads) for _ in range(sizes.depth)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(x), -1, -1)
        tokens = torch.cat([first, patches], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(tokens)[:, 0]))
        return logits
