"""`flow.utils`: data, checkpointing and hooks are PyTorch's."""

import torch.utils

from monograph.flow.names import forwarding, listing
from monograph.flow.utils import global_view, tensor

__all__ = ["global_view", "tensor"]
__getattr__ = forwarding("utils", torch.utils)
__dir__ = listing(globals(), torch.utils)
