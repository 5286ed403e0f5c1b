"""A tensor in a few numbers: enough to make it again, in the same layout and with the same bits."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any

import torch

from monograph.testing.strategies.values import Values, fill


@dataclass(frozen=True, repr=False)
class TensorSpec:
    """What a tensor is made from. Its repr is Python code that makes the same one.

    `order` lists the dimensions from the outermost in memory to the innermost, `steps` says how many elements are
    from one to the next where 1 would do, `expanded` dimensions repeat one piece of memory, and `offset` elements
    are before the first. The elements between and before hold other numbers, so that reading them shows.

    >>> TensorSpec((2, 3), order=(1, 0)).build().stride()
    (1, 2)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    _: KW_ONLY
    values: Values = "whole"
    low: float | None = None
    high: float | None = None
    order: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    expanded: tuple[int, ...] = ()
    offset: int = 0
    requires_grad: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        arguments = (
            [repr(self.shape)] if self.dtype is torch.float32 else [repr(self.shape), repr(self.dtype)]
        )
        options = {field.name: field.default for field in fields(self)[2:]}
        arguments += [
            f"{name}={getattr(self, name)!r}" for name, usual in options.items() if self._has(name, usual)
        ]
        return f"TensorSpec({', '.join(arguments)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def _has(self, name: str, usual: Any) -> bool:
        return bool(getattr(self, name) != usual)

    def strides(self) -> tuple[int, ...]:
        """The distance in memory between neighbours, for each dimension."""
        strides, distance = [0] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            if dim not in self.expanded:
                strides[dim] = distance * (self.steps[dim] if self.steps else 1)
                distance = strides[dim] * max(self.shape[dim], 1)
        return tuple(strides)

    def build(self) -> torch.Tensor:
        """The tensor: a leaf, new at each call, with the same bits each time."""
        strides = self.strides()
        reach = [(size - 1) * stride for size, stride in zip(self.shape, strides, strict=True)]
        length = 0 if 0 in self.shape else 1 + sum(reach)
        memory = fill(self.offset + length, self.dtype, self.values, self.seed, self.low, self.high)
        tensor = memory.as_strided(self.shape, strides, self.offset)
        return tensor.requires_grad_(self.requires_grad)


def build(spec: TensorSpec) -> torch.Tensor:
    """The tensor of a spec; Hypothesis prints it as this call, for its values alone do not show its layout."""
    tensor = spec.build()
    tensor._repr_pretty_ = partial(_print, spec)  # type: ignore[attr-defined]
    return tensor


def _print(spec: TensorSpec, printer: Any, cycle: bool) -> None:
    printer.text(f"build({spec!r})")
