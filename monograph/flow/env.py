"""The processes of a program: there is one. Under a launcher of several, DistributedError says so."""

from __future__ import annotations

from monograph.flow.names import forwarding
from monograph.flow.sbp import check_alone, placement

__getattr__ = forwarding("env", None)


def get_rank() -> int:
    """The number of this process."""
    check_alone()
    return 0


def get_local_rank() -> int:
    """The number of this process on its machine."""
    check_alone()
    return 0


def get_world_size() -> int:
    """How many processes there are."""
    check_alone()
    return 1


def get_node_size() -> int:
    """How many machines there are."""
    check_alone()
    return 1


def all_device_placement(device_type: str) -> placement:
    """A device of the type in every process."""
    return placement.all(device_type)


def rdma_is_initialized() -> bool:
    """Whether processes talk by RDMA: they do not."""
    return False
