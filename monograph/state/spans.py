"""The bytes that a tensor uses, as a range of addresses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch

from monograph.layout import extent

Span = tuple[int, int]  # first address, and the one after the last; equal if there are no bytes
_NOTHING: Span = (0, 0)


def span(tensor: torch.Tensor, *, whole: bool = False) -> Span:
    """The addresses between the first and the last byte of a tensor, or of the `whole` storage that it is a view of.

    Addresses, since two storages may share one memory: `torch.from_numpy(array)` makes another one each time.
    """
    if whole:
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
    else:
        size = extent(tensor.shape, tensor.stride(), tensor.element_size())
        start = tensor.data_ptr() if size else 0
    return (
        (start, start + size) if start else _NOTHING
    )  # tensors without data, such as those on meta, begin at 0


class Regions:
    """Ranges of addresses, those that meet joined."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        for start, end in sorted(spans):
            if start == end:
                continue
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(end, self.ends[-1])
            else:
                self.starts.append(start)
                self.ends.append(end)

    def __bool__(self) -> bool:
        return bool(self.starts)

    def meet(self, start: int, end: int) -> bool:
        """True if some byte of the range `start` to `end` is in one of them."""
        before = bisect_left(self.starts, end)
        return before > 0 and self.ends[before - 1] > start
