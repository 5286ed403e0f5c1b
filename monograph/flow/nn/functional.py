"""`torch.nn.functional`, and what OneFlow has besides."""

import torch.nn.functional

from monograph.flow.functions import (
    cross_entropy,
    ctc_greedy_decoder,
    depend,
    nll_loss,
    one_hot,
    quick_gelu,
    sparse_softmax_cross_entropy,
)
from monograph.flow.names import forwarding, listing

__all__ = [
    "cross_entropy",
    "ctc_greedy_decoder",
    "depend",
    "nll_loss",
    "one_hot",
    "quick_gelu",
    "sparse_softmax_cross_entropy",
]
__getattr__ = forwarding("nn.functional", torch.nn.functional)
__dir__ = listing(globals(), torch.nn.functional)
