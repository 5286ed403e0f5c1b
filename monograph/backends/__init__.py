"""Backends: each lowers a plan to a runner, which takes the program's inputs to its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from monograph.backends import aten, exact, inductor
from monograph.backends.convolutions import with_search
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.kernels.tuned import TunedKernel

LOWER: Mapping[str, Callable[[LoweringRequest], LoweredProgram]] = {
    "auto": aten.lower,
    "aten": aten.lower,
    "exact": exact.lower,
    "inductor": inductor.lower,
}

__all__ = ["LOWER", "LoweredProgram", "LoweringRequest", "TunedKernel", "lower"]


def lower(order: LoweringRequest) -> LoweredProgram:
    """What the backend that the settings name makes of a plan. Raises BackendError if it cannot."""
    return with_search(LOWER[order.settings.backend](order), order)
