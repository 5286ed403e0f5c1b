"""Backends: each lowers a plan to a runner, which takes the program's inputs to its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from monograph.backends import aten, exact, in_stages
from monograph.backends.convolutions import with_search
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.errors import BackendError, PlanError
from monograph.ir.text import bytes_text, bytes_texts
from monograph.kernels.tuned import TunedKernel
from monograph.settings import PLAIN

LOWER: Mapping[str, Callable[[LoweringRequest], LoweredProgram]] = {
    "auto": aten.lower,
    "aten": aten.lower,
    "exact": exact.lower,
    "inductor": in_stages.lower,
}

__all__ = ["LOWER", "LoweredProgram", "LoweringRequest", "TunedKernel", "lower"]


def lower(order: LoweringRequest) -> LoweredProgram:
    """What the backend that the settings name makes of a plan. Raises BackendError if it cannot.

    Compiled code that holds more than the plan may is a BackendError, too, and a PlanError op by op.
    """
    lowered = LOWER[order.settings.backend](order)
    limit, held = order.plan.limit, (lowered.memory or order.plan.memory).peak_bytes
    if limit is not None and held > limit:
        most, budget = bytes_texts(held, limit)
        message = f"{lowered.backend} holds {most} in its order of the step, and the budget is {budget}"
        hint = f"config.set_memory_budget({held}), or a smaller batch"
        raise (BackendError if lowered.backend != PLAIN else PlanError)(message, hint=hint)
    if (note := _of_budget(order)) is not None:
        lowered = replace(lowered, notes=(note, *lowered.notes))
    return with_search(lowered, order)


def _of_budget(order: LoweringRequest) -> str | None:
    """What a budget that is a share comes to; a number says that itself."""
    budget, limit = order.settings.memory_budget, order.plan.limit
    if budget is None or budget.share is None or limit is None:
        return None
    whole = bytes_text(round(limit / budget.share))
    return f"the memory budget {budget!r} is {bytes_text(limit)}: that share of {whole}, which the step makes with nothing computed again"
