"""A tensor, or the description of one, with another size in one dimension."""

from __future__ import annotations

from typing import Any

import torch

from monograph.ir.call.signature import Spec
from monograph.layout import fills_a_block


def resized(item: Any, dim: int, size: int, pad: float | int | bool) -> Any:
    """Cut, or with padding at the end. The order of strides and attributes stay; it is the same object if nothing changes.

    There are no gaps in its memory, so that a part of a larger tensor has the form of its padded copies.
    """
    present = item.shape[dim]
    if present == size and is_without_gaps(item):
        return item
    if isinstance(item, Spec):
        shape = list(item.shape)
        shape[dim] = size
        return Spec(shape, item.dtype, item.device)
    made = item.narrow(dim, 0, size).clone() if size <= present else _padded(item, dim, size, pad)
    vars(made).update(vars(item))
    return made


def is_without_gaps(item: Any) -> bool:
    """True for tensors whose elements are one block of memory, and for what describes one."""
    return isinstance(item, Spec) or item.is_contiguous() or fills_a_block(item.shape, item.stride())


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
