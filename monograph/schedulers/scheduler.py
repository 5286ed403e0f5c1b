"""The base of the schedulers: the rate is a function of the base rate and the step.

`get_lr(base_lr, step)` is that function; `step` counts from 0. Each scheduler takes `last_step`, where to go on, and
`verbose`, which prints each rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as of_torch

from monograph.compat.optimizers import LAST_RATES, SCHEDULERS_INSIDE, STEP_COUNT
from monograph.schedulers.stepping import OF_GRAPH, may_go_on, note_step, print_rate

_Untyped: Any = of_torch.LRScheduler  # whose get_lr() takes no arguments


class LRScheduler(_Untyped):  # type: ignore[misc]
    """Base of the schedulers; one of your own overrides `get_lr(base_lr, step)`.

    >>> class Halving(LRScheduler):
    ...     def get_lr(self, base_lr, step):
    ...         return base_lr * 0.5**step
    """

    of_graph = False  # True if a graph steps it

    def __init__(self, optimizer: Optimizer, last_step: int = -1, verbose: bool = False) -> None:
        self.verbose = verbose
        super().__init__(optimizer, last_step)

    @property
    def last_step(self) -> int:
        """The step that the present rate belongs to."""
        return int(self.last_epoch)

    @last_step.setter
    def last_step(self, step: int) -> None:
        self.last_epoch = step

    def get_lr(self, base_lr: Any, step: int) -> Any:
        """The learning rate at a step, counted from 0."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_lr(base_lr, step)")

    def rates(self, step: int) -> list[Any]:
        """The learning rates of the param groups at a step."""
        return [self.get_lr(base, step) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Go one step on, after the optimizer's. One that a graph steps does not go on twice for a step."""
        if not may_go_on(self):
            return
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:  # added since
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        setattr(self, STEP_COUNT, getattr(self, STEP_COUNT, 0) + 1)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        _set_rates(self, self.rates(self.last_epoch))
        note_step(self)

    def state_dict(self) -> dict[str, Any]:
        """The state, with that of the schedulers inside."""
        state: dict[str, Any] = super().state_dict()
        state.pop(OF_GRAPH, None)
        if SCHEDULERS_INSIDE in state:
            state[SCHEDULERS_INSIDE] = [scheduler.state_dict() for scheduler in state[SCHEDULERS_INSIDE]]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        state = dict(state_dict)
        for scheduler, inner in zip(
            getattr(self, SCHEDULERS_INSIDE, ()), state.pop(SCHEDULERS_INSIDE, ()), strict=True
        ):
            scheduler.load_state_dict(inner)
        super().load_state_dict(state)


def _set_rates(scheduler: Any, rates: Sequence[Any]) -> None:
    for index, (group, rate) in enumerate(zip(scheduler.optimizer.param_groups, rates, strict=True)):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        if scheduler.verbose:
            print_rate(scheduler, index, rate)
    setattr(scheduler, LAST_RATES, list(rates))
