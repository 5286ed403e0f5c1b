"""A tensor, or the description of one, with another size in one dimension."""

from __future__ import annotations

from typing import Any

import torch

from monograph.ir.call.signature import Spec


def resized(item: Any, dim: int, size: int, pad: float | int | bool) -> Any:
    """Cut, or with padding at the end. Layout and attributes stay; it is the same object if nothing changes."""
    present = item.shape[dim]
    if present == size:
        return item
    if isinstance(item, Spec):
        shape = list(item.shape)
        shape[dim] = size
        return Spec(shape, item.dtype, item.device)
    made = item.narrow(dim, 0, size).clone() if size < present else _padded(item, dim, size, pad)
    vars(made).update(vars(item))
    return made


def _padded(tensor: torch.Tensor, dim: int, size: int, pad: float | int | bool) -> torch.Tensor:
    dim %= tensor.dim()
    present = tensor.shape[dim]
    if tensor.is_contiguous():
        width = [0, 0] * (tensor.dim() - dim)
        width[-1] = size - present
        return torch.constant_pad_nd(tensor, width, pad)
    shape = list(tensor.shape)
    shape[dim] = size
    order = sorted(range(tensor.dim()), key=lambda index: (-tensor.stride()[index], index))
    made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)
    made.narrow(dim, 0, present).copy_(tensor)
    made.narrow(dim, present, size - present).fill_(pad)
    return made
