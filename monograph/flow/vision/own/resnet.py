"""ResNet (He et al. 2015, https://arxiv.org/abs/1512.03385), with the stride of a bottleneck at its 3x3 convolution.

ResNeXt (https://arxiv.org/abs/1611.05431) and Wide ResNet (https://arxiv.org/abs/1605.07146) are other widths of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]

BASE_WIDTH = 64


def conv3x3(inputs: int, outputs: int, *, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Conv2d:
    """A 3x3 convolution that keeps the size where the stride is 1."""
    return nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, groups, bias=False)


def conv1x1(inputs: int, outputs: int, *, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution."""
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut."""

    expansion = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        groups: int = 1,
        base_width: int = BASE_WIDTH,
        dilation: int = 1,
        norm_layer: Norm | None = None,
    ) -> None:
        super().__init__()
        if groups != 1 or base_width != BASE_WIDTH:
            raise ValueError("a BasicBlock has one group of 64; a Bottleneck takes others")
        if dilation > 1:
            raise NotImplementedError("a BasicBlock has no dilation; a Bottleneck takes it")
        norm = norm_layer or nn.BatchNorm2d
        self.conv1 = conv3x3(inplanes, planes, stride=stride)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = norm(planes)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        output: Tensor = self.relu(self.bn2(self.conv2(y)) + shortcut)
        return output


class Bottleneck(nn.Module):
    """Reduce (1x1), filter (3x3), widen (1x1), and the shortcut."""

    expansion = 4

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        groups: int = 1,
        base_width: int = BASE_WIDTH,
        dilation: int = 1,
        norm_layer: Norm | None = None,
    ) -> None:
        super().__init__()
        norm = norm_layer or nn.BatchNorm2d
        width = int(planes * (base_width / BASE_WIDTH)) * groups
        self.conv1 = conv1x1(inplanes, width)
        self.bn1 = norm(width)
        self.conv2 = conv3x3(width, width, stride=stride, groups=groups, dilation=dilation)
        self.bn2 = norm(width)
        self.conv3 = conv1x1(width, planes * self.expansion)
        self.bn3 = norm(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        output: Tensor = self.relu(self.bn3(self.conv3(y)) + shortcut)
        return output


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A stem, four stages of blocks whose numbers `layers` gives, and a linear classifier."""

    def __init__(
        self,
        block: Block,
        layers: Sequence[int],
        num_classes: int = 1000,
        zero_init_residual: bool = False,
        groups: int = 1,
        width_per_group: int = BASE_WIDTH,
        replace_stride_with_dilation: Sequence[bool] | None = None,
        norm_layer: Norm | None = None,
    ) -> None:
        super().__init__()
        dilate = replace_stride_with_dilation or (False, False, False)
        if len(dilate) != 3:
            raise ValueError(f"replace_stride_with_dilation has three entries, got {dilate}")
        self.groups, self.base_width = groups, width_per_group
        self.inplanes, self.dilation = 64, 1
        self._norm_layer = norm_layer or nn.BatchNorm2d
        self.conv1 = nn.Conv2d(3, self.inplanes, 7, stride=2, padding=3, bias=False)
        self.bn1 = self._norm_layer(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(block, 64, layers[0], stride=1)
        self.layer2 = self._stage(block, 128, layers[1], dilate=dilate[0])
        self.layer3 = self._stage(block, 256, layers[2], dilate=dilate[1])
        self.layer4 = self._stage(block, 512, layers[3], dilate=dilate[2])
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            initialise(module)
        if zero_init_residual:
            for module in self.modules():
                zero_last_norm(module)

    def _stage(
        self, block: Block, planes: int, count: int, *, stride: int = 2, dilate: bool = False
    ) -> nn.Sequential:
        """Blocks of one width. With `dilate` they see what a stride would show them, at full resolution."""
        first_dilation = self.dilation
        if dilate:
            self.dilation, stride = self.dilation * stride, 1
        outputs = planes * block.expansion
        blocks: list[nn.Module] = []
        for index in range(count):
            first = index == 0
            blocks.append(
                block(
                    self.inplanes,
                    planes,
                    stride if first else 1,
                    self._shortcut(outputs, stride=stride) if first else None,
                    self.groups,
                    self.base_width,
                    first_dilation if first else self.dilation,
                    self._norm_layer,
                )
            )
            self.inplanes = outputs
        return nn.Sequential(*blocks)

    def _shortcut(self, outputs: int, *, stride: int) -> nn.Module | None:
        if stride == 1 and self.inplanes == outputs:
            return None
        return nn.Sequential(conv1x1(self.inplanes, outputs, stride=stride), self._norm_layer(outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def initialise(module: nn.Module) -> None:
    """He initialisation for convolutions, ones and zeros for norms; the classifier keeps its own."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def zero_last_norm(module: nn.Module) -> None:
    """Let a block begin as its shortcut."""
    if isinstance(module, BasicBlock | Bottleneck):
        norm = module.bn3 if isinstance(module, Bottleneck) else module.bn2
        if isinstance(norm.weight, Tensor):
            nn.init.zeros_(norm.weight)
