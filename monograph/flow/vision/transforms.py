"""Transforms of images: torchvision's where it can be imported, else our own for those that are named here.

>>> import monograph.flow.vision.transforms as transforms
>>> to_input = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
>>> import numpy
>>> to_input(numpy.zeros((32, 32, 3), numpy.uint8)).shape
torch.Size([3, 32, 32])
"""

from __future__ import annotations

from typing import Any

from monograph import UnavailableError
from monograph.flow.vision._choice import (
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
    all_transforms,
)

__all__ = [
    "CenterCrop",
    "Compose",
    "InterpolationMode",
    "Lambda",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "Resize",
    "ToPILImage",
    "ToTensor",
]


def __getattr__(name: str) -> Any:
    """What else torchvision has. UnavailableError for a name that is not to be had."""
    if name.startswith("__"):
        raise AttributeError(name)
    if hasattr(all_transforms, name):
        return getattr(all_transforms, name)
    if all_transforms is not None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise UnavailableError(
        f"there is no transform {name} without torchvision",
        hint=f"pip install 'monograph[vision]'; without it there are {', '.join(__all__)}",
    )
