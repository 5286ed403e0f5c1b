"""Models by their names."""

from __future__ import annotations

from typing import Any

from torch import nn

from monograph import DefinitionError
from monograph.flow.vision._weights import Pretrained
from monograph.flow.vision.models import resnet
from monograph.flow.vision.models.alexnet import alexnet
from monograph.flow.vision.models.mobilenet_v2 import mobilenet_v2
from monograph.flow.vision.models.neural_style_transfer.stylenet import neural_style_transfer

_RESNETS = [getattr(resnet, name) for name in resnet.__all__ if name != "ResNet"]
_MODELS = {make.__name__: make for make in (alexnet, mobilenet_v2, neural_style_transfer, *_RESNETS)}


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
