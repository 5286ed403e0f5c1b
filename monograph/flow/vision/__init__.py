"""The part of `flowvision` that OneFlow's tutorials use: models, data sets and transforms. Nothing is ever downloaded.

>>> import monograph.flow.vision as flowvision
>>> model = flowvision.models.mobilenet_v2(num_classes=10, width_mult=0.25)
>>> model(torch.randn(2, 3, 32, 32)).shape
torch.Size([2, 10])
"""

from monograph.flow.vision import datasets, models, transforms

__all__ = ["datasets", "models", "transforms"]
