"""What is torchvision's where it can be imported, and our own elsewhere: the one place that decides.

A torchvision that was built for another torch raises a RuntimeError or an OSError when it is imported.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = [
    "AlexNet",
    "BasicBlock",
    "Bottleneck",
    "CenterCrop",
    "Compose",
    "InterpolationMode",
    "Lambda",
    "MobileNetV2",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "ResNet",
    "Resize",
    "ToPILImage",
    "ToTensor",
    "all_transforms",
]


def _transforms_of_torchvision() -> ModuleType | None:
    try:
        return import_module("torchvision.transforms")
    except (ImportError, OSError, RuntimeError):
        return None


all_transforms = _transforms_of_torchvision()  # None without torchvision

if TYPE_CHECKING or all_transforms is None:
    from monograph.flow.vision.own.alexnet import AlexNet
    from monograph.flow.vision.own.mobilenet_v2 import MobileNetV2
    from monograph.flow.vision.own.resnet import BasicBlock, Bottleneck, ResNet
    from monograph.flow.vision.own.transforms import (
        CenterCrop,
        Compose,
        InterpolationMode,
        Lambda,
        Normalize,
        RandomCrop,
        RandomHorizontalFlip,
        RandomVerticalFlip,
        Resize,
        ToPILImage,
        ToTensor,
    )
else:
    from torchvision.models import AlexNet, MobileNetV2, ResNet
    from torchvision.models.resnet import BasicBlock, Bottleneck
    from torchvision.transforms import (
        CenterCrop,
        Compose,
        InterpolationMode,
        Lambda,
        Normalize,
        RandomCrop,
        RandomHorizontalFlip,
        RandomVerticalFlip,
        Resize,
        ToPILImage,
        ToTensor,
    )
