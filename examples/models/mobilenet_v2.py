"""MobileNetV2, written from the paper (Sandler et al. 2018, https://arxiv.org/abs/1801.04381)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stage:
    """One row of table 2 of the paper."""

    expansion: int
    channels: int
    num_blocks: int
    stride: int


STAGES = (
    Stage(expansion=1, channels=16, num_blocks=1, stride=1),
    Stage(expansion=6, channels=24, num_blocks=2, stride=2),
    Stage(expansion=6, channels=32, num_blocks=3, stride=2),
    Stage(expansion=6, channels=64, num_blocks=4, stride=2),
    Stage(expansion=6, channels=96, num_blocks=3, stride=1),
    Stage(expansion=6, channels=160, num_blocks=3, stride=2),
    Stage(expansion=6, channels=320, num_blocks=1, stride=1),
)
STEM_CHANNELS = 32
LAST_CHANNELS = 1280


class ConvNormRelu6(nn.Sequential):
    """Convolution, batch normalisation, ReLU6."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    """Expand (1x1), filter each channel (3x3), project (1x1, linear); add the input where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [ConvNormRelu6(inputs, hidden, kernel=1)] if expansion != 1 else []
        self.layers = nn.Sequential(
            *expand,
            ConvNormRelu6(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.adds_input = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds_input else self.layers(x)


class MobileNetV2(nn.Module):
    """The network at width 1.0. `first_stride=1` keeps the resolution of small images such as 32x32."""

    def __init__(
        self,
        num_classes: int = 10,
        *,
        first_stride: int = 2,
        dropout: float = 0.2,
        stages: tuple[Stage, ...] = STAGES,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = [ConvNormRelu6(3, STEM_CHANNELS, kernel=3, stride=first_stride)]
        channels = STEM_CHANNELS
        for stage in stages:
            for i in range(stage.num_blocks):
                stride = stage.stride if i == 0 else 1
                blocks.append(
                    InvertedResidual(channels, stage.channels, stride=stride, expansion=stage.expansion)
                )
                channels = stage.channels
        blocks.append(ConvNormRelu6(channels, LAST_CHANNELS, kernel=1))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(LAST_CHANNELS, num_classes))
        self.apply(init_weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.mean(self.features(x), dim=(2, 3)))


def init_weights(module: nn.Module) -> None:
    """He initialisation for convolutions, small normal weights for the classifier."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
