"""A step that a GradScaler may skip: the update is computed, and where infinities were found the old values stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from monograph._torch import found_infinite, is_symbolic
from monograph.errors import OptimizerError

Place = tuple[Any, Any, Any, str]  # container, key, what is there, and the name for messages


def step_or_skip(optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
    """What a scaler does in a trace in place of `if not found_inf.item(): optimizer.step()`."""
    found = found_infinite(optimizer_state)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    before = {(id(container), key): _kept(item) for container, key, item, _ in _places(optimizer)}
    old = [parameter.detach().clone() for parameter in parameters]
    groups = [dict(group) for group in optimizer.param_groups]
    returned = optimizer.step(*args, **kwargs)
    with torch.no_grad():
        for parameter, value in zip(parameters, old, strict=True):
            parameter.copy_(torch.where(found, value, parameter))
        for container, key, item, name in list(_places(optimizer)):
            if (id(container), key) not in before:
                raise _refused(optimizer, f"makes {name} in its first step, which may be skipped")
            _choose(container, key, item, before[id(container), key], found, name, optimizer)
    for group, known in zip(optimizer.param_groups, groups, strict=True):
        for key in group:
            if key != "params" and group[key] is not known.get(key):
                raise _refused(optimizer, f"changes {key} of a param group")
    return returned


def _choose(
    container: Any, key: Any, item: Any, before: Any, found: torch.Tensor, name: str, optimizer: Optimizer
) -> None:
    if isinstance(item, torch.Tensor) and isinstance(before, torch.Tensor):
        chosen = torch.where(found, before, item)
        if container[key] is item and (item.shape, item.dtype) == (chosen.shape, chosen.dtype):
            item.copy_(chosen)
        else:
            container[key] = chosen
    elif item is not before and not (type(item) is type(before) and not is_symbolic(item) and item == before):
        raise _refused(optimizer, f"counts {name} in Python, where a skipped step cannot leave it alone")


def _places(optimizer: Optimizer) -> Iterator[Place]:
    for owner, entries in optimizer.state.items():
        if not isinstance(owner, torch.Tensor) or owner.grad is not None:
            yield from _inside(entries, "its state")


def _inside(container: Any, name: str) -> Iterator[Place]:
    for key, item in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(item, (dict, list)):
            yield from _inside(item, f"{name}/{key}")
        else:
            yield container, key, item, f"{name}/{key}"


def _kept(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def _refused(optimizer: Optimizer, what: str) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} {what}: a gradient scaler cannot skip its step in a graph",
        hint="keep counters in tensors; SGD needs dampening=0; or take the first step in eager mode",
    )
