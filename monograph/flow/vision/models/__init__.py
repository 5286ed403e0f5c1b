"""Models as flowvision has them: `mobilenet_v2`, the ResNets, `alexnet`, and the network of fast style transfer.

Each is made by `name(pretrained=False, progress=True, **options)`. `pretrained` is the path of a file with weights, for
weights are never downloaded; `progress` has nothing to show.
"""

from monograph.flow.vision.models.alexnet import AlexNet, alexnet
from monograph.flow.vision.models.creator import ModelCreator
from monograph.flow.vision.models.mobilenet_v2 import MobileNetV2, mobilenet_v2
from monograph.flow.vision.models.neural_style_transfer.stylenet import FastNeuralStyle, neural_style_transfer
from monograph.flow.vision.models.resnet import (
    ResNet,
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

__all__ = [
    "AlexNet",
    "FastNeuralStyle",
    "MobileNetV2",
    "ModelCreator",
    "ResNet",
    "alexnet",
    "mobilenet_v2",
    "neural_style_transfer",
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
