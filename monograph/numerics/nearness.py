"""Whether two results are the same up to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from monograph.state.find import Owned, module_slots

# relative to the largest element; sums over more elements round otherwise
_TOLERANCES = {torch.float16: 3e-2, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-9}
_SMALL = 1e-3  # numbers that are smaller may be apart as those of this size


@dataclass(frozen=True)
class Apart:
    """Two values of one result that are not the same."""

    expected: Any
    got: Any
    is_number: bool

    def __str__(self) -> str:
        if self.is_number:
            return f"{_number(self.got)} with padding and {_number(self.expected)} without"
        return f"up to {self.got:.6g} away from what it is without padding"


def tolerance_of(owned: Owned, amp: torch.dtype | None) -> float:
    """What rounding may do to the results of a step: 1e-4 in float32, 1e-9 in float64, 3e-2 in half precision."""
    dtypes = {slot.tensor.dtype for slot in module_slots(owned.named_modules())} | ({amp} if amp else set())
    return max(
        [_TOLERANCES[dtype] for dtype in dtypes if dtype in _TOLERANCES], default=_TOLERANCES[torch.float32]
    )


def comparable(expected: Any, got: Any) -> bool:
    """True for two numbers, and for two tensors of floating point of one shape."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return isinstance(expected, (int, float)) and isinstance(got, (int, float))
    is_dense = expected.layout is got.layout is torch.strided
    is_wide = expected.is_floating_point() or expected.is_complex()
    return is_dense and expected.shape == got.shape and (is_wide or expected.numel() == 1)


def apart(expected: Any, got: Any, tolerance: float) -> Apart | None:
    """How two values that can be compared differ by more than rounding; None if they do not."""
    one, other = torch.as_tensor(expected).detach(), torch.as_tensor(got).detach()
    is_number = one.numel() == 1
    if not (one.is_floating_point() or one.is_complex()):
        return None if torch.equal(one, other) else Apart(one, other, is_number=True)
    tolerance = max(tolerance, _TOLERANCES.get(one.dtype, 0.0))
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = one.isfinite() & other.isfinite()
    if (~finite & ~((one == other) | (one.isnan() & other.isnan()))).any():
        farthest = float("inf")
    elif finite.any():
        farthest = (one - other).abs()[finite].max().item()
        if farthest <= tolerance * max(one.abs()[finite].max().item(), _SMALL):
            return None
    else:
        return None
    return Apart(one, other, is_number=True) if is_number else Apart(None, farthest, is_number=False)


def _number(value: torch.Tensor) -> str:
    found = value.item()
    return f"{found:.6g}" if isinstance(found, float) else str(found)
