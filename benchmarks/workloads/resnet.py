"""ResNet-50 (He et al. 2015, with the stride in the 3x3 convolution) on small images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workload import Batch, Update, Workload, class_targets

NUM_CLASSES = 10
EXPANSION = 4


@dataclass(frozen=True)
class Sizes:
    """Images in a batch, their side, blocks per stage, and channels of the first stage."""

    batch: int
    side: int
    depths: tuple[int, ...]
    width: int


def workload(*, smoke: bool) -> Workload:
    """A classifier of 64x64 images."""
    sizes = Sizes(2, 32, (1, 1), 8) if smoke else Sizes(16, 64, (3, 4, 6, 3), 64)

    def make_batch(generator: torch.Generator) -> Batch:
        x = torch.randn(sizes.batch, 3, sizes.side, sizes.side, generator=generator)
        return x, class_targets(sizes.batch, NUM_CLASSES, generator)

    return Workload(
        name="resnet50",
        title=f"ResNet-50, {sizes.batch} images of {sizes.side}x{sizes.side}, SGD with momentum",
        sizes=sizes,
        make_model=lambda: ResNet(sizes),
        make_batch=make_batch,
        loss=F.cross_entropy,
        update=Update("sgd", lr=0.01, momentum=0.9, weight_decay=1e-4),
        jax_port="resnet",
        has_images=True,
    )


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a short cut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        # as usual since Goyal et al. 2017; without it the rounding of float32 decides about the second loss
        nn.init.zeros_(self.norm3.weight)
        self.short = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        short: Tensor = self.short(x)
        return F.relu(self.norm3(self.conv3(y)) + short, inplace=True)


class ResNet(nn.Module):
    """Stem, stages of bottlenecks, mean over the image, linear head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, sizes.width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(sizes.width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels = sizes.width
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(sizes.depths):
            width = sizes.width * 2**stage
            for number in range(depth):
                blocks.append(Bottleneck(channels, width, stride=2 if number == 0 and stage > 0 else 1))
                channels = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits
