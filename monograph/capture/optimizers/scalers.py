"""Gradient scalers in a trace. A step that one may skip: the update is computed, and where infinities were found old values stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import ASGD, Optimizer, Rprop

from monograph.capture.optimizers.asked_state import AskedState
from monograph.compat.amp import found_infinite
from monograph.compat.patching import replaced
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import CaptureError, OptimizerError

# state that begins as the learning rate of the first step that is not skipped
_FROM_RATE = {Rprop: "step_size", ASGD: "eta"}


@dataclass(frozen=True)
class _Place:
    """Where a piece of optimizer state is, what is there, and its name for messages."""

    container: Any
    key: Any
    item: Any
    name: str


def step_or_skip(optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
    """What a scaler does in a trace in place of `if not found_inf.item(): optimizer.step()`."""
    found = found_infinite(optimizer_state)
    parameters = _with_gradient(optimizer)
    if isinstance(state := optimizer.state, AskedState):
        state.come()
    owners = [owner for owner in _owners(optimizer) if _takes_part(owner)]
    places = list(_places(optimizer, owners))
    old = [_copied(parameter) for parameter in parameters]
    old_state = [_copied(place.item) for place in places]
    groups = [dict(group) for group in optimizer.param_groups]
    returned = optimizer.step(*args, **kwargs)
    with torch.no_grad():
        for parameter, value in zip(parameters, old, strict=True):
            parameter.copy_(torch.where(found, value, parameter))
        for place, copy in zip(places, old_state, strict=True):
            _choose(place, copy, found, optimizer)
    for group, known in zip(optimizer.param_groups, groups, strict=True):
        for key in group:
            if key != "params" and group[key] is not known.get(key):
                raise _refused(optimizer, f"changes {key} of a param group")
    return returned


@contextmanager
def no_new_state(optimizer: Optimizer) -> Iterator[None]:
    """To be entered around a step that may be skipped: it must find its state, since it cannot take it back."""
    # places hold their containers, whose ids cannot come again
    known = {(id(place.container), place.key): place for place in _places(optimizer, _owners(optimizer))}
    yield
    for place in _places(optimizer, _owners(optimizer)):
        if (id(place.container), place.key) not in known:
            raise _refused(optimizer, f"makes {place.name} in its first step, which may be skipped")


def begin_with_rate(optimizer: Optimizer) -> None:
    """Let state that begins as the learning rate begin so in this step, if no step was made until now.

    It was declared at capture. The rate may have moved while steps were skipped, and `lr_scale` scales it.
    """
    name = next((name for kind, name in _FROM_RATE.items() if isinstance(optimizer, kind)), None)
    for group in optimizer.param_groups if name is not None else ():
        for parameter in group["params"]:
            entries = optimizer.state.get(parameter)
            if parameter.grad is not None and entries and not parameter.is_complex():
                entry, rate = entries[name], group["lr"]
                is_first = entries["step"].to(entry.device) == 0
                first = rate.to(entry) if isinstance(rate, torch.Tensor) else torch.full_like(entry, rate)
                entry.copy_(torch.where(is_first, first, entry))


def _choose(place: _Place, copy: Any, found: torch.Tensor, optimizer: Optimizer) -> None:
    """Put back what was there, of which there is a copy, if infinities were found."""
    container, key, before = place.container, place.key, place.item
    item = container[key]
    if isinstance(item, torch.Tensor) and isinstance(before, torch.Tensor):
        chosen = torch.where(found, copy, item)
        if item is before and (item.shape, item.dtype) == (chosen.shape, chosen.dtype):
            item.copy_(chosen)
        else:
            container[key] = chosen  # the step put another tensor there, which may be a gradient
    elif item is not before and not (type(item) is type(before) and not is_symbolic(item) and item == before):
        raise _refused(
            optimizer, f"counts {place.name} in Python, where a skipped step cannot leave it alone"
        )


def _with_gradient(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _takes_part(owner: Any) -> bool:
    return not isinstance(owner, torch.Tensor) or owner.grad is not None


def _places(optimizer: Optimizer, owners: list[Any]) -> Iterator[_Place]:
    for owner in owners:
        yield from _inside(dict.__getitem__(optimizer.state, owner), "its state")


def _owners(optimizer: Optimizer) -> list[Any]:
    return list(dict.keys(optimizer.state))  # a look that is no look of the step


def _inside(container: Any, name: str) -> Iterator[_Place]:
    for key, item in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(item, (dict, list)):
            yield from _inside(item, f"{name}/{key}")
        else:
            yield _Place(container, key, item, f"{name}/{key}")


def _copied(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def _refused(optimizer: Optimizer, what: str) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} {what}: a gradient scaler cannot skip its step in a graph",
        hint="keep counters in tensors; SGD needs dampening=0; or take the first step in eager mode",
    )


@contextmanager
def foreign_scalers_refused(known: object) -> Iterator[None]:
    """Inside, an enabled `GradScaler` other than `known` raises when it is used in this thread: it would keep tensors of the trace."""
    thread = threading.get_ident()

    def only_known(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler is not known and scaler.is_enabled() and threading.get_ident() == thread:
                raise CaptureError(
                    "build() uses a gradient scaler that the graph does not know",
                    hint="call self.set_grad_scaler(scaler) in __init__, and write loss.backward() in build()",
                )
            return original(scaler, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in ("scale", "unscale_", "step", "update"):
            original = getattr(torch.amp.GradScaler, name)
            stack.enter_context(replaced(torch.amp.GradScaler, name, only_known(original)))
        yield
