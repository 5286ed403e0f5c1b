"""A U-Net (Ronneberger et al. 2015) with batch norm, which gives each pixel a class: few weights, large activations.

It is a workload of `benchmarks.memory` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workload import Batch, Update, Workload

NUM_CLASSES = 2


@dataclass(frozen=True)
class Sizes:
    """Channels at each depth, and the shape of a batch."""

    widths: tuple[int, ...]
    batch: int
    side: int


def workload(*, smoke: bool) -> Workload:
    """Two classes for the pixels of square images."""
    sizes = Sizes((4, 8), 2, 16) if smoke else Sizes((16, 32, 64, 128, 256), 4, 128)

    def make_batch(generator: torch.Generator) -> Batch:
        shape = (sizes.batch, sizes.side, sizes.side)
        x = torch.randn(sizes.batch, 3, *shape[1:], generator=generator)
        return x, torch.randint(NUM_CLASSES, shape, generator=generator)

    return Workload(
        name="unet",
        title=f"U-Net, {'-'.join(map(str, sizes.widths))} channels, {sizes.batch} images of "
        f"{sizes.side}x{sizes.side}, AdamW",
        sizes=sizes,
        make_model=lambda: UNet(sizes.widths),
        make_batch=make_batch,
        loss=F.cross_entropy,
        update=Update("adamw", lr=1e-3, weight_decay=0.01),
        jax_port=None,
        has_images=True,
    )


class UNet(nn.Module):
    """Down to the widest layer, and up again beside what was computed on the way down."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.first = pair(3, widths[0])
        self.down = nn.ModuleList(pair(few, many) for few, many in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(many, few, 2, stride=2) for few, many in reversed(steps))
        self.mix = nn.ModuleList(pair(2 * few, few) for few, _ in reversed(steps))
        self.last = nn.Conv2d(widths[0], NUM_CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped: list[Tensor] = []
        for down in self.down:
            skipped.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, mix in zip(self.up, self.mix, strict=True):
            x = mix(torch.cat([skipped.pop(), up(x)], dim=1))
        logits: Tensor = self.last(x)
        return logits


def pair(before: int, after: int) -> nn.Sequential:
    """Two convolutions, each with its norm."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [
            nn.Conv2d(channels, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)
