"""Optimizers around optimizers: which of them has the state, and which is to be stepped.

A wrapper that shows the param groups and the state of the one inside, such as those of training frameworks, is stepped
as it is: its own code runs in the capture, and leads to the step of the one inside. One that has param groups or state
of its own is two optimizers in one, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monograph.capture.guards.sources.attributes import attributes_of
from monograph.compat.optimizers import OPTIMIZER_HOOK_FIELDS
from monograph.errors import OptimizerError


def parts_of(optimizer: Any) -> tuple[Optimizer, Any]:
    """The optimizer that has the state, and the wrapper that is stepped in its place; None if there is none.

    Raises OptimizerError for what is no optimizer, and for several in one.
    """
    if isinstance(optimizer, LRScheduler):
        raise OptimizerError(
            f"add_optimizer() takes a torch.optim.Optimizer, got a {type(optimizer).__name__}, which is a scheduler",
            hint="pass both: self.add_optimizer(optimizer, lr_sch=scheduler)",
        )
    held = dict(_held(optimizer))
    if not held:
        if not isinstance(optimizer, Optimizer) or not _is_whole(optimizer):
            raise OptimizerError(
                f"add_optimizer() takes a torch.optim.Optimizer, got a {type(optimizer).__name__}",
                hint="pass the optimizer: self.add_optimizer(torch.optim.AdamW(self.model.parameters()))"
                if not isinstance(optimizer, Optimizer)
                else "call super().__init__(params, defaults) in its __init__",
            )
        return optimizer, None
    kind = type(optimizer).__name__
    if len(held) > 1:
        calls = "; ".join(f"self.add_optimizer(optimizer.{name})" for name in held)
        raise OptimizerError(f"the {kind} holds {len(held)} optimizers", hint=f"add each of them: {calls}")
    ((name, inside),) = held.items()
    if not _shows(optimizer, inside):
        problem = (
            "has param groups or state of its own: a graph would see one of the two"
            if hasattr(optimizer, "param_groups") or hasattr(optimizer, "state")
            else "does not show its param_groups and its state"
        )
        raise OptimizerError(
            f"the {kind} holds another optimizer, the {type(inside).__name__} in its attribute {name}, and {problem}",
            hint=f"add the one inside, self.add_optimizer(optimizer.{name}), and do in build() what the {kind} does "
            "besides; or write both as one optimizer that keeps everything in self.state",
        )
    innermost, stepped = parts_of(inside)
    if getattr(getattr(optimizer, "step", None), "__self__", None) is inside:  # it has none of its own
        return innermost, stepped
    return innermost, optimizer


def layers_of(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those inside of it, the outermost first."""
    yield optimizer
    for _, inside in _held(optimizer):
        yield from layers_of(inside)


def _held(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The optimizers that one holds, by what a user calls them."""
    seen = {id(optimizer)}
    for name, value in (attributes_of(optimizer) or {}).items():
        public = name.lstrip("_")
        if isinstance(value, dict):
            found = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            found = [(f"{name}[{position}]", item) for position, item in enumerate(value)]
        else:
            found = [(public if getattr(optimizer, public, None) is value else name, value)]
        for label, item in found:
            if id(item) not in seen and _is_optimizer(item):
                seen.add(id(item))
                yield label, item


def _is_optimizer(item: Any) -> bool:
    if isinstance(item, Optimizer) and _is_whole(item):
        return True
    wraps = isinstance(item, Optimizer) or (hasattr(item, "param_groups") and hasattr(item, "step"))
    return wraps and any(True for _ in _held(item))


def _is_whole(optimizer: Any) -> bool:
    """True if `Optimizer.__init__` has made it what it is."""
    table = attributes_of(optimizer) or {}
    return all(name in table for name in ("param_groups", "state", *OPTIMIZER_HOOK_FIELDS))


def _shows(optimizer: Any, inside: Any) -> bool:
    """True if a wrapper has the param groups and the state of the one inside."""
    return all(getattr(optimizer, name, None) is getattr(inside, name) for name in ("param_groups", "state"))
