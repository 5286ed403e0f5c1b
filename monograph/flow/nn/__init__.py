"""`torch.nn`, with `Graph` and the modules that OneFlow has besides."""

import torch.nn

from monograph.flow.names import forwarding
from monograph.flow.nn import functional, graph
from monograph.flow.nn.graph import Graph
from monograph.flow.nn.modules import (
    CombinedMarginLoss,
    FusedBatchNorm1d,
    FusedBatchNorm2d,
    FusedBatchNorm3d,
    FusedMLP,
    QuickGELU,
    RMSLayerNorm,
)

__all__ = [
    "CombinedMarginLoss",
    "FusedBatchNorm1d",
    "FusedBatchNorm2d",
    "FusedBatchNorm3d",
    "FusedMLP",
    "Graph",
    "QuickGELU",
    "RMSLayerNorm",
    "functional",
    "graph",
]
__getattr__ = forwarding("nn", torch.nn)
