"""A tensor sent to another process, and received from one: torch's ops wait for it, and its groups carry it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monograph.compat.distributed.groups import group_named, torch_groups


def begin_send(tensor: torch.Tensor, to: int, tag: int, group: str) -> torch.Tensor:
    """Send a contiguous tensor to a rank of a group. What it gives is empty, and to be waited for.

    What: the table of what is under way. Why: `_c10d_functional.isend` enters what it sends there as well, where nobody can take it
    out: such a tensor lives as long as the process. Degraded path: none, nothing could be sent.
    """
    work = group_named(group).send([tensor], to, tag)
    handle = tensor.new_empty(0)
    torch_groups()._register_work(handle, work)
    return handle


def begin_receive(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int, tag: int, group: str
) -> torch.Tensor:
    """A contiguous tensor that a rank of a group sends; it is there once it was waited for.

    What: as above. Why: `_c10d_functional.irecv` writes what it is given. Degraded path: none.
    """
    made = torch.empty([*shape], dtype=dtype, device=device)
    work = group_named(group).recv([made], source, tag)
    torch_groups()._register_work(made, work)
    return made
