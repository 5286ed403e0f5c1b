"""Models by their names."""

from __future__ import annotations

from typing import Any

from torch import nn

from monograph.errors import DefinitionError
from monograph.flow.vision._weights import Pretrained
from monograph.flow.vision.models.alexnet import alexnet
from monograph.flow.vision.models.mobilenet_v2 import mobilenet_v2
from monograph.flow.vision.models.neural_style_transfer.stylenet import neural_style_transfer
from monograph.flow.vision.models.resnet import (
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50_32x4d,
    resnext101_32x8d,
    wide_resnet50_2,
    wide_resnet101_2,
)

_MODELS = {
    make.__name__: make
    for make in (
        alexnet,
        mobilenet_v2,
        neural_style_transfer,
        resnet18,
        resnet34,
        resnet50,
        resnet101,
        resnet152,
        resnext50_32x4d,
        resnext101_32x8d,
        wide_resnet50_2,
        wide_resnet101_2,
    )
}


class ModelCreator:
    """Makes models by their names.

    >>> ModelCreator.create_model("resnet18", num_classes=10).fc.out_features
    10
    """

    @staticmethod
    def create_model(model_name: str, pretrained: Pretrained = False, **options: Any) -> nn.Module:
        """The model of a name. DefinitionError for a name that is not known, CheckpointError for its weights."""
        if model_name not in _MODELS:
            raise DefinitionError(
                f"there is no model {model_name!r}", hint=f"choose one of {', '.join(sorted(_MODELS))}"
            )
        model: nn.Module = _MODELS[model_name](pretrained, **options)
        return model
