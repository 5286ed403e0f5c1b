"""The processes of a program. Those that torchrun has started find each other at the first question."""

from __future__ import annotations

import os

from monograph.flow.names import forwarding
from monograph.flow.tensors.shared import placement
from monograph.flow.tensors.world import rank, size

__getattr__ = forwarding("env", None)


def get_rank() -> int:
    """The number of this process."""
    return rank()


def get_local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK") or rank())


def get_world_size() -> int:
    """How many processes there are."""
    return size()


def get_node_size() -> int:
    """How many machines there are, of as many processes each as this one says."""
    return size() // int(os.environ.get("LOCAL_WORLD_SIZE") or size())


def all_device_placement(device_type: str) -> placement:
    """A device of the type in every process."""
    return placement.all(device_type)


def rdma_is_initialized() -> bool:
    """Whether processes talk by RDMA: they do not."""
    return False
