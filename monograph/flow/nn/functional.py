"""`torch.nn.functional`, and what OneFlow has besides."""

import torch.nn.functional

from monograph.flow.functions import (
    ctc_greedy_decoder,
    depend,
    quick_gelu,
    sparse_softmax_cross_entropy,
)
from monograph.flow.names import forwarding, listing

__all__ = ["ctc_greedy_decoder", "depend", "quick_gelu", "sparse_softmax_cross_entropy"]
__getattr__ = forwarding("nn.functional", torch.nn.functional)
__dir__ = listing(globals(), torch.nn.functional)
