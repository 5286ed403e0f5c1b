"""Operators of our own that a program may hold: formulas of torch's autograd that look at values on their way.

Between its arguments and its result each works on tensors whose size depends on data; the result has a known size, so
that a graph can hold it. They compute what torch's own formulas compute in eager mode, in the same order.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_LIBRARY: Final = torch.library.Library("monograph", "DEF")
_LIBRARY.define("masked_sum(Tensor x, Tensor mask) -> Tensor")
_LIBRARY.define("indexed_sum(Tensor x, int dim, Tensor index) -> Tensor")
_LIBRARY.define("taken(Tensor x, Tensor?[] indices, int[] size) -> Tensor")


def _masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_select(mask).sum()


def _indexed_sum(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    positions: torch.Tensor = torch.ops.aten._unique(index, sorted=False)[0]
    return x.index_select(dim, positions).sum()


def _taken(x: torch.Tensor, indices: list[torch.Tensor | None], size: list[int]) -> torch.Tensor:
    taken: torch.Tensor = torch.ops.aten.index.Tensor(x, indices)
    return taken.sum_to_size(size) if taken.shape != torch.Size(size) else taken


for _name, _kernel in (("masked_sum", _masked_sum), ("indexed_sum", _indexed_sum), ("taken", _taken)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


def _one_number(x: torch.Tensor, *_args: Any) -> torch.Tensor:
    return x.new_empty(())


def _sized(x: torch.Tensor, _indices: Any, size: list[int]) -> torch.Tensor:
    return x.new_empty(size)


torch.library.register_fake("monograph::masked_sum", _one_number, lib=_LIBRARY)
torch.library.register_fake("monograph::indexed_sum", _one_number, lib=_LIBRARY)
torch.library.register_fake("monograph::taken", _sized, lib=_LIBRARY)

MASKED_SUM: Final = torch.ops.monograph.masked_sum.default
INDEXED_SUM: Final = torch.ops.monograph.indexed_sum.default
TAKEN: Final = torch.ops.monograph.taken.default
