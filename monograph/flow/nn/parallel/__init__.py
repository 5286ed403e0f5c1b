"""`torch.nn.parallel`; of its wrappers the one that OneFlow has too does nothing in one process."""

from __future__ import annotations

from typing import Any

import torch.nn.parallel
from torch import nn

from monograph.flow.names import forwarding
from monograph.flow.sbp import check_alone

__getattr__ = forwarding("nn.parallel", torch.nn.parallel)


def DistributedDataParallel(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """The module itself: there is one process, whose gradients are whole. DistributedError under a launcher of several."""
    check_alone()
    return module
