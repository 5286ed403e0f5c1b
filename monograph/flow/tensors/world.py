"""The processes of a program. Those that torchrun has started find each other when a script first needs the others."""

from __future__ import annotations

import os

import torch.distributed as dist

from monograph import DistributedError
from monograph.distributed.placements import num_launched

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def begin() -> None:
    """Make the process group of a launcher, as OneFlow does by itself. Raises DistributedError where nothing says how."""
    if dist.is_initialized() or num_launched() == 1:
        return
    if missing := [name for name in _OF_TORCHRUN if name not in os.environ]:
        raise DistributedError(
            f"a launcher has started {num_launched()} processes, and does not say how they find each other: "
            f"{', '.join(missing)} is not set",
            hint="start the script by itself, or with torchrun --nproc-per-node=2",
        )
    dist.init_process_group()


def rank() -> int:
    """The number of this process."""
    begin()
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    begin()
    return dist.get_world_size() if dist.is_initialized() else 1
