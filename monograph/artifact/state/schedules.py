"""Learning-rate schedulers of torch and of our own without their optimizer and without code: what a loaded step moves them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.optim import lr_scheduler

from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.leaves import Json, check, list_of
from monograph.compat.optimizers import (
    SCHEDULERS_INSIDE,
    make_scale_function,
    mark_wrapped,
    marking_as_stepped,
    scales_by_function,
    schedulers_inside,
)
from monograph.schedulers import by_formula, composed, of_torch

_OF_TORCH: Final = (
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.PolynomialLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.SequentialLR,
    lr_scheduler.ChainedScheduler,
)
_OF_FLOW: Final = (
    by_formula.ConstantLR,
    by_formula.LinearLR,
    by_formula.StepLR,
    by_formula.MultiStepLR,
    by_formula.ExponentialLR,
    by_formula.PolynomialLR,
    by_formula.CosineDecayLR,
    by_formula.CosineAnnealingLR,
    by_formula.CosineAnnealingWarmRestarts,
    composed.SequentialLR,
    composed.WarmUpLR,
    composed.ChainedScheduler,
    of_torch.OneCycleLR,
    of_torch.CyclicLR,
)
_NAMES: Final[Mapping[type[Any], str]] = {
    **{kind: kind.__name__ for kind in _OF_TORCH},
    **{kind: f"flow.{kind.__name__}" for kind in _OF_FLOW},
}
_KINDS: Final = {name: kind for kind, name in _NAMES.items()}
_HINT: Final = (
    "use a scheduler of torch or of monograph.flow that holds no function, or add the optimizer without one and set the learning rate of the "
    "loaded artifact by hand: artifact.hyperparameters"
)


class _Groups:
    """The param groups of an optimizer, for its scheduler."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups
        self.defaults: dict[str, Any] = {}
        marking_as_stepped(self)()

    def step(self) -> None:
        """What schedulers look at, to warn of a wrong order."""


mark_wrapped(_Groups.step)


def kind_to_json(scheduler: Any) -> Json:
    """The class of a scheduler and of those inside of it; `Refused` for one that holds code of the user's."""
    kind = type(scheduler)
    if kind not in _NAMES:
        raise Refused(f"the scheduler {kind.__name__} computes with code that an artifact cannot hold", _HINT)
    if scales_by_function(scheduler):
        raise Refused(f"the scheduler {kind.__name__} has a scale_fn, which an artifact cannot hold", _HINT)
    return [_NAMES[kind], [kind_to_json(item) for item in schedulers_inside(scheduler)]]


def scheduler_from(kind: Json, state: Any, groups: list[dict[str, Any]], depth: int = 10) -> Any:
    """The scheduler of a kind with a state, moving these param groups."""
    check(depth > 0, "a scheduler holds schedulers without an end")
    name, inside = list_of(kind, 2)
    cls = _KINDS.get(name) if type(name) is str else None
    if cls is None:
        raise Damaged(f"it has the unknown scheduler {str(name)[:60]!r}")
    check(isinstance(state, dict) and all(type(key) is str for key in state), f"{name} has no state")
    attributes = dict(state)
    states = attributes.pop(SCHEDULERS_INSIDE, [])
    check(isinstance(states, list) and len(states) == len(list_of(inside)), f"{name} has a wrong state")
    hides = any(callable(getattr(cls, key, None)) for key in attributes)
    check(not hides, f"the state of {name} would hide a method")
    scheduler = object.__new__(cls)
    vars(scheduler).update(attributes, optimizer=_Groups(groups))
    if inside:
        vars(scheduler)[SCHEDULERS_INSIDE] = [
            scheduler_from(item, inner, groups, depth - 1) for item, inner in zip(inside, states, strict=True)
        ]
    if issubclass(cls, lr_scheduler.CyclicLR):
        make_scale_function(scheduler)
    return scheduler
