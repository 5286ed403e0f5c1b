"""MobileNetV2, written from the paper (Sandler et al. 2018, https://arxiv.org/abs/1801.04381)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]

# of each row of table 2 of the paper: expansion, channels, number of blocks, stride of the first
TABLE: Sequence[Sequence[int]] = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
FIRST_CHANNELS = 32
LAST_CHANNELS = 1280


class ConvBNActivation(nn.Sequential):
    """Convolution, normalisation, ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, norm: Norm, stride: int = 1, groups: int = 1
    ) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, norm(outputs), nn.ReLU6(inplace=True))
        self.out_channels = outputs


class InvertedResidual(nn.Module):
    """Expand (1x1), filter each channel (3x3), project (1x1, linear); add the input where the shapes agree."""

    def __init__(
        self, inp: int, oup: int, stride: int, expand_ratio: int, norm_layer: Norm | None = None
    ) -> None:
        super().__init__()
        if stride not in (1, 2):
            raise ValueError(f"the stride of an InvertedResidual is 1 or 2, not {stride}")
        norm = norm_layer or nn.BatchNorm2d
        hidden = round(inp * expand_ratio)
        expand = [] if expand_ratio == 1 else [ConvBNActivation(inp, hidden, 1, norm=norm)]
        self.conv = nn.Sequential(
            *expand,
            ConvBNActivation(hidden, hidden, 3, norm=norm, stride=stride, groups=hidden),
            nn.Conv2d(hidden, oup, 1, bias=False),
            norm(oup),
        )
        self.stride = stride
        self.out_channels = oup
        self.use_res_connect = stride == 1 and inp == oup

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.use_res_connect else y


class MobileNetV2(nn.Module):
    """The network of the paper; `width_mult` scales its channels, to multiples of `round_nearest`."""

    def __init__(
        self,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        inverted_residual_setting: Sequence[Sequence[int]] | None = None,
        round_nearest: int = 8,
        block: Callable[..., nn.Module] | None = None,
        norm_layer: Norm | None = None,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        block, norm = block or InvertedResidual, norm_layer or nn.BatchNorm2d
        table = TABLE if inverted_residual_setting is None else inverted_residual_setting
        if not table or len(table[0]) != 4:
            raise ValueError(f"inverted_residual_setting has rows of 4 numbers, got {table}")
        channels = multiple(FIRST_CHANNELS * width_mult, round_nearest)
        self.last_channel = multiple(LAST_CHANNELS * max(1.0, width_mult), round_nearest)
        layers: list[nn.Module] = [ConvBNActivation(3, channels, 3, norm=norm, stride=2)]
        for expansion, base, num_blocks, first_stride in table:
            outputs = multiple(base * width_mult, round_nearest)
            for stride in (first_stride, *[1] * (num_blocks - 1)):
                layers.append(block(channels, outputs, stride, expand_ratio=expansion, norm_layer=norm))
                channels = outputs
        layers.append(ConvBNActivation(channels, self.last_channel, 1, norm=norm))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(self.last_channel, num_classes))
        for module in self.modules():
            initialise(module)

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1))
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


def multiple(channels: float, divisor: int) -> int:
    """The multiple of `divisor` nearest to `channels`, at least one and not more than a tenth below."""
    nearest = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return nearest if nearest >= 0.9 * channels else nearest + divisor


def initialise(module: nn.Module) -> None:
    """He initialisation for convolutions, small normal weights for the classifier."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    else:
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)
