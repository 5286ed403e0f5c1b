"""MobileNetV2 of the examples on small images: many cheap convolutions and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workload import Batch, Update, Workload, class_targets
from examples.models.mobilenet_v2 import STAGES, STEM_CHANNELS, MobileNetV2

NUM_CLASSES = 10


@dataclass(frozen=True)
class Block:
    """One inverted residual block: its channels, its stride, and how much it widens."""

    inputs: int
    outputs: int
    stride: int
    expansion: int


@dataclass(frozen=True)
class Sizes:
    """Images in a batch, their side, and the blocks of the network."""

    batch: int
    side: int
    first_stride: int
    blocks: tuple[Block, ...]


def workload(*, smoke: bool) -> Workload:
    """A classifier of 32x32 images whose first convolution keeps their resolution."""
    sizes = Sizes(batch=8 if smoke else 64, side=32, first_stride=1 if smoke else 2, blocks=blocks())

    def make_batch(generator: torch.Generator) -> Batch:
        x = torch.randn(sizes.batch, 3, sizes.side, sizes.side, generator=generator)
        return x, class_targets(sizes.batch, NUM_CLASSES, generator)

    return Workload(
        name="mobilenetv2",
        title=f"MobileNetV2, {sizes.batch} images of {sizes.side}x{sizes.side}, first stride {sizes.first_stride}, "
        "SGD with momentum",
        sizes=sizes,
        make_model=lambda: make_model(sizes),
        make_batch=make_batch,
        loss=F.cross_entropy,
        update=Update("sgd", lr=1e-4, momentum=0.9, weight_decay=5e-4),
        jax_port="mobilenet",
        has_images=True,
    )


def make_model(sizes: Sizes) -> nn.Module:
    """The network without dropout."""
    return MobileNetV2(NUM_CLASSES, first_stride=sizes.first_stride, dropout=0.0)


def blocks() -> tuple[Block, ...]:
    """The rows of the example's table, one block each."""
    found: list[Block] = []
    channels = STEM_CHANNELS
    for stage in STAGES:
        for number in range(stage.num_blocks):
            stride = stage.stride if number == 0 else 1
            found.append(Block(channels, stage.channels, stride, stage.expansion))
            channels = stage.channels
    return tuple(found)
