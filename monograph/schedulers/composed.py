"""Schedulers made of others: one after the other, after a warm-up, or one on top of the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from monograph.compat.optimizers import SCHEDULERS_INSIDE
from monograph.errors import OptimizerError
from monograph.schedulers.scheduler import LRScheduler


class SequentialLR(LRScheduler):
    """One scheduler after the other; `milestones[i]` is the step at which number `i + 1` takes over.

    All count the same steps. With `interval_rescaling`, a bool or one for each milestone, a scheduler counts from its
    own milestone.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[LRScheduler],
        milestones: Sequence[int],
        interval_rescaling: bool | Sequence[bool] = False,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        _check_inside("SequentialLR", schedulers, optimizer)
        several = list(interval_rescaling) if isinstance(interval_rescaling, Sequence) else None
        if len(milestones) != len(schedulers) - 1 or (several and len(several) != len(milestones)):
            raise OptimizerError(
                f"SequentialLR got {len(schedulers)} schedulers and {len(milestones)} milestones",
                hint="give one milestone less than schedulers, and one interval_rescaling for each or for all",
            )
        self._schedulers, self.milestones = list(schedulers), list(milestones)
        self.interval_rescaling = several or [bool(interval_rescaling)] * len(milestones)
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        index = bisect_right(self.milestones, step)
        if index and self.interval_rescaling[index - 1]:
            step -= self.milestones[index - 1]
        return self._schedulers[index].get_lr(base_lr, step)


class WarmUpLR(LRScheduler):
    """A smaller rate for the first `warmup_iters` steps, then what the wrapped scheduler or optimizer has.

    "constant" stays at `base_lr * warmup_factor`; "linear" goes from there, on a line, to the rate that the scheduler
    has at step `warmup_iters`. The scheduler counts all steps, or with `warmup_prefix` those after the warm-up: the
    line then ends at `base_lr`.
    """

    def __init__(
        self,
        scheduler_or_optimizer: LRScheduler | Optimizer,
        warmup_factor: float = 1.0 / 3,
        warmup_iters: int = 5,
        warmup_method: str = "linear",
        warmup_prefix: bool = False,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        if warmup_method not in ("linear", "constant"):
            raise OptimizerError(
                f"unknown warmup_method {warmup_method!r}", hint='choose "linear" or "constant"'
            )
        wraps = not isinstance(scheduler_or_optimizer, Optimizer)
        optimizer: Any = (
            getattr(scheduler_or_optimizer, "optimizer", None) if wraps else scheduler_or_optimizer
        )
        if wraps:
            self._schedulers = [scheduler_or_optimizer]
            _check_inside("WarmUpLR", self._schedulers, optimizer)
        self.warmup_factor, self.warmup_iters = warmup_factor, warmup_iters
        self.warmup_method, self.warmup_prefix = warmup_method, warmup_prefix
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        length = self.warmup_iters
        if step >= length:
            return self._behind(base_lr, step)
        start = base_lr * self.warmup_factor
        if self.warmup_method == "constant":
            return start
        return start + (self._behind(base_lr, length) - start) * (step / length)

    def _behind(self, base_lr: Any, step: int) -> Any:
        if not hasattr(self, SCHEDULERS_INSIDE):
            return base_lr
        inner: Any = self._schedulers[0]
        return inner.get_lr(base_lr, step - self.warmup_iters if self.warmup_prefix else step)


WarmupLR = WarmUpLR


class ChainedScheduler(LRScheduler):
    """Each scheduler takes the rate of the one before as its base rate."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        optimizer = getattr(schedulers[0], "optimizer", None) if schedulers else None
        _check_inside("ChainedScheduler", schedulers, optimizer)
        self._schedulers = list(schedulers)
        super().__init__(schedulers[0].optimizer)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        for scheduler in self._schedulers:
            base_lr = scheduler.get_lr(base_lr, step)
        return base_lr


def _check_inside(kind: str, schedulers: Any, optimizer: Any) -> None:
    given = list(schedulers) if isinstance(schedulers, (list, tuple)) else []
    if not given:
        raise OptimizerError(f"{kind} got no schedulers", hint="give a list of schedulers")
    for index, scheduler in enumerate(given):
        if not isinstance(scheduler, LRScheduler):
            raise OptimizerError(
                f"{kind} got a {type(scheduler).__name__} as scheduler {index}",
                hint="it takes schedulers of flow.optim.lr_scheduler, whose rate is a function of the step",
            )
        if scheduler.optimizer is not optimizer:
            raise OptimizerError(
                f"scheduler {index} of {kind} belongs to another optimizer",
                hint="make all of them with one optimizer",
            )
