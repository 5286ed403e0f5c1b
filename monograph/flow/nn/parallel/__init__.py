"""`torch.nn.parallel`; of its wrappers the one that OneFlow has too does nothing in one process."""

from __future__ import annotations

import torch.nn.parallel
from torch import nn

from monograph.flow.names import forwarding
from monograph.flow.tensors.world import size

__getattr__ = forwarding("nn.parallel", torch.nn.parallel)


def DistributedDataParallel(
    module: nn.Module,
    *,
    broadcast_buffers: bool = True,
    broadcast_parameters: bool = True,
    bucket_size: int = 10,
    use_bucket: bool = True,
) -> nn.Module:
    """`torch.nn.parallel.DistributedDataParallel`; in one process, whose gradients are whole, the module itself.

    All begin with the parameters of the first process, and buckets are torch's, which changes no numbers.
    """
    if size() == 1:
        return module
    return torch.nn.parallel.DistributedDataParallel(module, broadcast_buffers=broadcast_buffers)
