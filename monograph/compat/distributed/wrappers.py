"""The wrapper `DistributedDataParallel`: what it was asked for, beyond its public attributes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unknown_wishes(wrapper: DistributedDataParallel) -> str:
    """What a wrapper does with gradients or types that a step without it would not do; empty if there is nothing.

    What: the lists in which it keeps hooks. Degraded path: hooks are not noticed.
    """
    if getattr(wrapper, "_comm_hooks", ()):
        return "a communication hook"
    if getattr(wrapper, "mixed_precision", None) is not None:
        return "mixed precision of its own"
    if getattr(wrapper, "_delay_all_reduce_params", ()):
        return "delayed reductions"
    return ""


def syncs_buffers(wrapper: DistributedDataParallel) -> bool:
    """True if buffers are those of the first process whenever a wrapper runs.

    What: an attribute that has another name from 2.13 on. Degraded path: the older name.
    """
    found = getattr(wrapper, "forward_sync_buffers", None)
    return bool(wrapper.broadcast_buffers if found is None else found)


def ignored_by(wrapper: DistributedDataParallel) -> set[str]:
    """The names of parameters and buffers that every process has of its own."""
    found: Any = getattr(wrapper, "parameters_to_ignore", ())
    return set(found)


def is_data_parallel(module: nn.Module) -> bool:
    """True for the wrapper."""
    return isinstance(module, DistributedDataParallel)
