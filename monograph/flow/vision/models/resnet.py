"""The ResNets, from 18 to 152 layers, ResNeXt and Wide ResNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monograph.flow.vision._choice import BasicBlock, Bottleneck, ResNet
from monograph.flow.vision._weights import Pretrained, with_weights

__all__ = [
    "ResNet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]


def resnet18(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNet with 18 layers. CheckpointError for weights that do not fit."""
    return _resnet("resnet18", BasicBlock, [2, 2, 2, 2], pretrained, options)


def resnet34(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNet with 34 layers. CheckpointError for weights that do not fit."""
    return _resnet("resnet34", BasicBlock, [3, 4, 6, 3], pretrained, options)


def resnet50(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNet with 50 layers. CheckpointError for weights that do not fit."""
    return _resnet("resnet50", Bottleneck, [3, 4, 6, 3], pretrained, options)


def resnet101(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNet with 101 layers. CheckpointError for weights that do not fit."""
    return _resnet("resnet101", Bottleneck, [3, 4, 23, 3], pretrained, options)


def resnet152(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNet with 152 layers. CheckpointError for weights that do not fit."""
    return _resnet("resnet152", Bottleneck, [3, 8, 36, 3], pretrained, options)


def resnext50_32x4d(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNeXt with 50 layers in 32 groups of width 4. CheckpointError for weights that do not fit."""
    return _resnet(
        "resnext50_32x4d",
        Bottleneck,
        [3, 4, 6, 3],
        pretrained,
        options | {"groups": 32, "width_per_group": 4},
    )


def resnext101_32x8d(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNeXt with 101 layers in 32 groups of width 8. CheckpointError for weights that do not fit."""
    return _resnet(
        "resnext101_32x8d",
        Bottleneck,
        [3, 4, 23, 3],
        pretrained,
        options | {"groups": 32, "width_per_group": 8},
    )


def wide_resnet50_2(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNet with 50 layers of twice the width. CheckpointError for weights that do not fit."""
    return _resnet(
        "wide_resnet50_2", Bottleneck, [3, 4, 6, 3], pretrained, options | {"width_per_group": 128}
    )


def wide_resnet101_2(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> ResNet:
    """ResNet with 101 layers of twice the width. CheckpointError for weights that do not fit."""
    return _resnet(
        "wide_resnet101_2", Bottleneck, [3, 4, 23, 3], pretrained, options | {"width_per_group": 128}
    )


def _resnet(
    name: str,
    block: type[BasicBlock] | type[Bottleneck],
    layers: Sequence[int],
    pretrained: Pretrained,
    options: dict[str, Any],
) -> ResNet:
    return with_weights(lambda: ResNet(block, layers, **options), pretrained, name=name)
