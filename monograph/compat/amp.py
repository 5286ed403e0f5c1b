"""Autocast and gradient scalers: the state of `torch.autocast` in this thread, and the fields of `torch.amp.GradScaler`.

Without those fields no step with a GradScaler is captured; without it all goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def autocast_state() -> Mapping[str, Any]:
    """The autocast settings of this thread, by device type."""
    return {device: autocast_on(device) for device in AUTOCAST_DEVICES}


def autocast_on(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


AUTOCAST_DEVICES = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)


@contextmanager
def autocast_kept() -> Iterator[None]:
    """What: autocast's settings and its count of open blocks, put back at the end. Why: a block that was entered and
    never left would keep old casts of weights for ever. Degraded path: none.
    """
    depth, cached = _autocast_depth(), torch.is_autocast_cache_enabled()
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in autocast_state()]
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, autocast is off on every device: what runs has its casts among its ops already."""
    with ExitStack() as stack:
        for device, dtype in autocast_state().items():
            if dtype is not None:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def is_dynamic_scaler(scaler: object) -> bool:
    """True for torch's own scaler, whose scale is a tensor that moves."""
    return isinstance(scaler, torch.amp.GradScaler)


def scaler_tables(scaler: Any) -> list[dict[Any, Any]]:
    """The dicts in which a scaler keeps what a step changes, for a snapshot."""
    inside = vars(scaler).get("_per_optimizer_states")
    return [vars(scaler), *([inside] if isinstance(inside, dict) else [])]


def forget_unscaled(scaler: Any) -> None:
    """Let a scaler forget for which optimizers it has unscaled gradients since its last `update()`."""
    for table in scaler_tables(scaler)[1:]:
        table.clear()
    if not is_dynamic_scaler(scaler):
        scaler.update()


SCALER_TENSORS = ("_scale", "_growth_tracker")
_SCALER_FACTS = (
    "_enabled",
    "_scale",
    "_growth_tracker",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
)


def scaler_values(scaler: object) -> dict[str, Any]:
    """What a step knows of a scaler: its tensors, and the numbers by which its scale moves."""
    table = vars(scaler) if scaler is not None else {}
    return {name.strip("_"): table[name] for name in _SCALER_FACTS if name in table}


def make_scale(scaler: Any, device: torch.device) -> None:
    """What: the scale and growth tracker of a GradScaler, made now. Why: it makes them when it first scales, which
    is too late for a graph. Degraded path: none.
    """
    if scaler.is_enabled() and scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)


def found_infinite(optimizer_state: Mapping[str, Any]) -> torch.Tensor:
    """Whether a GradScaler has found infinities in the gradients of an optimizer, as a tensor."""
    first, *others = optimizer_state["found_inf_per_device"].values()
    found: torch.Tensor = first
    for other in others:
        found = found + other.to(found.device)
    return found != 0


# the method of a GradScaler that asks for the value of found_inf before it lets an optimizer step
ASKING_STEP = "_maybe_opt_step"

# What: the function by which scalers look for infinities in a list of gradients. Why: of gradients in parts, those of all
# processes count. Degraded path: torch's own rule for them.
UNSCALE: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
