"""What a tensor holds, in a few numbers that a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import describe


@dataclass(frozen=True)
class Summary:
    """The range of a value: of the finite elements the least, the largest and the mean; the others are counted."""

    form: str  # "f32[8, 16]", "float"
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    num_nan: int = 0
    num_inf: int = 0

    @property
    def is_finite(self) -> bool:
        """True if there is neither NaN nor Inf."""
        return not self.num_nan and not self.num_inf

    def __str__(self) -> str:
        parts = [f"{n} {what}" for n, what in ((self.num_nan, "NaN"), (self.num_inf, "Inf")) if n]
        others = "the others " if parts else ""
        if self.low is not None:
            parts += [
                others
                + (f"{self.low:.6g}" if self.low == self.high else f"{self.low:.6g} to {self.high:.6g}")
            ]
        if self.low != self.high and self.mean is not None:
            parts += [f"mean {self.mean:.6g}"]
        return f"{self.form} {', '.join(parts)}".rstrip()


def summary(item: Any) -> Summary:
    """The range of a tensor or number, or of all that an op gives together; of anything else its form only."""
    form = _form(item)
    parts = [_parts(tensor) for tensor in _tensors(item) if tensor.numel()]
    finite = [part[0] for part in parts if part[0] is not None]
    counts = sum(part[1] for part in parts), sum(part[2] for part in parts)
    if not finite:
        return Summary(form, None, None, None, *counts)
    low, high = min(low for low, _, _ in finite), max(high for _, high, _ in finite)
    return Summary(form, low, high, finite[0][2] if len(parts) == 1 else None, *counts)


def _form(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(map(_form, item))})"
    return str(describe(item) or type(item).__name__)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    for leaf in leaves_in(item):
        if isinstance(leaf, (bool, int, float)):
            yield torch.tensor(leaf, dtype=torch.float64)
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def _parts(tensor: torch.Tensor) -> tuple[tuple[float, float, float] | None, int, int]:
    """Least, largest and mean of the finite elements, and how many are NaN and Inf."""
    wide = tensor.detach().double()
    nan, inf = wide.isnan(), wide.isinf()
    counts = int(nan.sum()), int(inf.sum())
    finite = wide[~(nan | inf)] if any(counts) else wide
    if not finite.numel():
        return None, *counts
    return (float(finite.min()), float(finite.max()), float(finite.mean())), *counts
