"""`mobilenet_v2`."""

from __future__ import annotations

from typing import Any

from monograph.flow.vision._choice import MobileNetV2
from monograph.flow.vision._weights import Pretrained, with_weights

__all__ = ["MobileNetV2", "mobilenet_v2"]


def mobilenet_v2(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> MobileNetV2:
    """MobileNetV2; `options` are those of the class. CheckpointError for weights that do not fit.

    >>> from monograph.flow.vision.models import mobilenet_v2
    >>> mobilenet_v2(num_classes=10, width_mult=0.25).classifier[1]
    Linear(in_features=1280, out_features=10, bias=True)
    """
    return with_weights(lambda: MobileNetV2(**options), pretrained, name="mobilenet_v2")
