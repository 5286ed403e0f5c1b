"""Copies of a tensor onto itself, shifted: eager mode reads some elements after it has overwritten them."""

from __future__ import annotations

from math import gcd

import torch
from torch import fx

from monograph.capture.memory import memory_root
from monograph.capture.spans import extent
from monograph.errors import AliasError
from monograph.ir.meta import origin

_LARGEST = 1 << 28  # elements between the first and the last, for which a look at each one costs too much


def check_self_copies(graph: fx.Graph) -> None:
    """Raise AliasError for a `copy_` in a recorded step whose source and target overlap and are not the same."""
    for node in graph.nodes:
        if node.target is not torch.ops.aten.copy_.default:
            continue
        target, source = node.args[:2]
        if isinstance(source, fx.Node) and memory_root(target) is memory_root(source):
            written, read = target.meta["val"], source.meta["val"]
            if _layout(written) != _layout(read) and _overlap(written, read):
                raise AliasError(
                    "copy_ reads memory that it writes: what eager mode makes of it depends on the order",
                    where=origin(node),
                    hint="copy from a .clone()",
                )


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two views of one memory have a byte in common. They may be fakes."""
    unit = gcd(first.element_size(), second.element_size())
    starts = [t.storage_offset() * t.element_size() // unit for t in (first, second)]
    ends = [
        start + extent(t.shape, t.stride(), t.element_size() // unit)
        for start, t in zip(starts, (first, second), strict=True)
    ]
    begin, end = min(starts), max(ends)
    if not first.numel() or not second.numel() or max(starts) >= min(ends):
        return False
    if end - begin > _LARGEST:
        return True
    seen = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    _units(seen, first, unit, starts[0] - begin).fill_(True)
    return bool(_units(seen, second, unit, starts[1] - begin).any())


def _units(seen: torch.Tensor, tensor: torch.Tensor, unit: int, start: int) -> torch.Tensor:
    """What `tensor` has of a map of memory in units of bytes. A dimension without a step counts once."""
    size = tensor.element_size() // unit
    dimensions = [(n, step * size) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    shape, strides = [n for n, _ in dimensions], [step for _, step in dimensions]
    return seen.as_strided([*shape, size], [*strides, 1], start)
