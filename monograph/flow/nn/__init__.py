"""`torch.nn`, with `Graph` and the modules that OneFlow has besides."""

import torch.nn

from monograph.flow.names import forwarding, listing
from monograph.flow.nn import functional, graph, parallel
from monograph.flow.nn.graph import Graph
from monograph.flow.nn.layers import (
    CombinedMarginLoss,
    CrossEntropyLoss,
    FusedBatchNorm1d,
    FusedBatchNorm2d,
    FusedBatchNorm3d,
    FusedMLP,
    NLLLoss,
    QuickGELU,
    RMSLayerNorm,
)

__all__ = [
    "CombinedMarginLoss",
    "CrossEntropyLoss",
    "FusedBatchNorm1d",
    "FusedBatchNorm2d",
    "FusedBatchNorm3d",
    "FusedMLP",
    "Graph",
    "NLLLoss",
    "QuickGELU",
    "RMSLayerNorm",
    "functional",
    "graph",
    "parallel",
]
__getattr__ = forwarding("nn", torch.nn)
__dir__ = listing(globals(), torch.nn)
