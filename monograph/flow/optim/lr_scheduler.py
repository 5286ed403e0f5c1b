"""Learning-rate schedulers with OneFlow's names and formulas; each docstring states the formula."""

from monograph.schedulers.by_formula import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineDecayLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    PolynomialLR,
    StepLR,
)
from monograph.schedulers.composed import ChainedScheduler, SequentialLR, WarmUpLR, WarmupLR
from monograph.schedulers.of_torch import CyclicLR, MultiplicativeLR, OneCycleLR, ReduceLROnPlateau
from monograph.schedulers.scheduler import LRScheduler

_LRScheduler = LRScheduler  # as PyTorch once spelled it

__all__ = [
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CosineDecayLR",
    "CyclicLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
    "WarmUpLR",
    "WarmupLR",
]
