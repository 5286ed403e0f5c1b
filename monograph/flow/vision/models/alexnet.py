"""`alexnet`."""

from __future__ import annotations

from typing import Any

from monograph.flow.vision._choice import AlexNet
from monograph.flow.vision._weights import Pretrained, with_weights

__all__ = ["AlexNet", "alexnet"]


def alexnet(pretrained: Pretrained = False, progress: bool = True, **options: Any) -> AlexNet:
    """AlexNet; `options` are `num_classes` and `dropout`. CheckpointError for weights that do not fit."""
    return with_weights(lambda: AlexNet(**options), pretrained, name="alexnet")
