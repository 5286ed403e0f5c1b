"""Learning-rate schedulers with OneFlow's names and formulas: the rate is a function of the base rate and the step.

`get_lr(base_lr, step)` is that function; `step` counts from 0. Each scheduler takes `last_step`, where to go on, and
`verbose`, which prints each rate. Users find them in `monograph.flow.optim.lr_scheduler`; they stand here because
artifacts hold them.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as of_torch

from monograph.compat.optimizers import LAST_RATES, SCHEDULERS_INSIDE, STEP_COUNT, forget_step, step_is_noted
from monograph.errors import OptimizerError

_OF_GRAPH = "of_graph"


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
        if not _may_go_on(self):
            return
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:  # added since
            self.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
        setattr(self, STEP_COUNT, getattr(self, STEP_COUNT, 0) + 1)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        _set_rates(self, self.rates(self.last_epoch))
        _went_on(self)

    def state_dict(self) -> dict[str, Any]:
        """The state, with that of the schedulers inside."""
        state: dict[str, Any] = super().state_dict()
        state.pop(_OF_GRAPH, None)
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
            _tell(scheduler, index, rate)
    setattr(scheduler, LAST_RATES, list(rates))


def _may_go_on(scheduler: Any) -> bool:
    """False if the optimizer has not stepped since the last time: OneFlow's scripts step a scheduler of a graph too."""
    if not scheduler.of_graph or step_is_noted(scheduler.optimizer):
        return True
    warnings.warn(
        f"step() of a {type(scheduler).__name__} that a graph steps by itself has no effect; leave the call out",
        stacklevel=3,
    )
    return False


def _went_on(scheduler: Any) -> None:
    if scheduler.of_graph:
        forget_step(scheduler.optimizer)


def follow_graph(scheduler: Any) -> None:
    """Let a scheduler know that a graph steps it; one of torch's own does not."""
    if isinstance(scheduler, (LRScheduler, _OfTorch)):
        scheduler.of_graph = True
        forget_step(scheduler.optimizer)


def _tell(scheduler: Any, index: int, rate: Any) -> None:
    kind = type(scheduler).__name__
    print(f"{kind}: step {scheduler.last_epoch}: lr of param_groups[{index}] is {float(rate):.6g}")


class ConstantLR(LRScheduler):
    """`base_lr * factor` for the first `total_iters` steps, then `base_lr`."""

    def __init__(
        self,
        optimizer: Optimizer,
        factor: float = 1.0 / 3,
        total_iters: int = 5,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.factor, self.total_iters = _fraction("factor", factor), total_iters
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        return base_lr * self.factor if step < self.total_iters else base_lr


class LinearLR(LRScheduler):
    """A factor that goes from `start_factor` to `end_factor` in `total_iters` steps, on a line."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.start_factor = _fraction("start_factor", start_factor)
        self.end_factor = _fraction("end_factor", end_factor)
        self.total_iters = total_iters
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        done = step / self.total_iters if step < self.total_iters else 1.0
        return base_lr * (self.start_factor + (self.end_factor - self.start_factor) * done)


class StepLR(LRScheduler):
    """`base_lr * gamma ** (step // step_size)`."""

    def __init__(
        self,
        optimizer: Optimizer,
        step_size: int,
        gamma: float = 0.1,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.step_size, self.gamma = _positive("step_size", step_size), gamma
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        return base_lr * self.gamma ** (step // self.step_size)


class MultiStepLR(LRScheduler):
    """`base_lr * gamma ** k`, where `k` of the `milestones` have been reached."""

    def __init__(
        self,
        optimizer: Optimizer,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        return base_lr * self.gamma ** bisect_right(self.milestones, step)


class ExponentialLR(LRScheduler):
    """`base_lr * gamma ** step`."""

    def __init__(
        self, optimizer: Optimizer, gamma: float, last_step: int = -1, verbose: bool = False
    ) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        return base_lr * self.gamma**step


class PolynomialLR(LRScheduler):
    """`(base_lr - end) * (1 - step / n) ** power + end`, with `n = decay_batch` and `step` at most `n`.

    With `cycle` the step goes on and `n` is the next multiple of `decay_batch`, so that the rate rises again.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        decay_batch: int,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.decay_batch = _positive("decay_batch", decay_batch)
        self.end_learning_rate, self.power, self.cycle = end_learning_rate, power, cycle
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        whole = self.decay_batch
        if self.cycle:
            step = max(step, 1)
            whole *= math.ceil(step / whole)
        left = 1 - min(step, whole) / whole
        return (base_lr - self.end_learning_rate) * left**self.power + self.end_learning_rate


class CosineDecayLR(LRScheduler):
    """`base_lr * ((1 - alpha) * 0.5 * (1 + cos(pi * step / decay_steps)) + alpha)`, then `base_lr * alpha`."""

    def __init__(
        self,
        optimizer: Optimizer,
        decay_steps: int,
        alpha: float = 0.0,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.decay_steps, self.alpha = _positive("decay_steps", decay_steps), alpha
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        decay = 0.5 * (1 + math.cos(math.pi * step / self.decay_steps)) if step < self.decay_steps else 0.0
        return base_lr * ((1 - self.alpha) * decay + self.alpha)


class CosineAnnealingLR(LRScheduler):
    """`eta_min + (base_lr - eta_min) * 0.5 * (1 + cos(pi * step / T_max))`: down and up again, and so on."""

    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int,
        eta_min: float = 0.0,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.T_max, self.eta_min = _positive("T_max", T_max), eta_min
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        return self.eta_min + (base_lr - self.eta_min) * 0.5 * (1 + math.cos(math.pi * step / self.T_max))


class CosineAnnealingWarmRestarts(LRScheduler):
    """Cosine annealing that begins anew (https://arxiv.org/abs/1608.03983), each time `T_mult` times as long.

    Run `k` begins from `base_lr * decay_rate ** k`. After `restart_limit` runs, if that is not 0, the rate stays at
    `eta_min`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        decay_rate: float = 1.0,
        restart_limit: int = 0,
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        self.T_0, self.T_mult = _positive("T_0", T_0), _positive("T_mult", T_mult)
        self.eta_min, self.decay_rate, self.restart_limit = eta_min, decay_rate, restart_limit
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        run, length = 0, self.T_0
        if self.T_mult == 1:
            run, step = divmod(step, length)
        while 0 < length <= step:
            run, step, length = run + 1, step - length, length * self.T_mult
        if 0 < self.restart_limit <= run:
            return self.eta_min
        top = base_lr * self.decay_rate**run
        return self.eta_min + (top - self.eta_min) * 0.5 * (1 + math.cos(math.pi * step / length))


class LambdaLR(LRScheduler):
    """`base_lr * lr_lambda(step)`; one function for all param groups, or a list with one for each."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_step: int = -1,
        verbose: bool = False,
    ) -> None:
        count = len(optimizer.param_groups)
        self.lr_lambdas = list(lr_lambda) if isinstance(lr_lambda, Sequence) else [lr_lambda] * count
        if len(self.lr_lambdas) != count:
            raise OptimizerError(
                f"LambdaLR got {len(self.lr_lambdas)} functions for {count} param groups",
                hint="give one function, or one for each group",
            )
        super().__init__(optimizer, last_step, verbose)

    def get_lr(self, base_lr: Any, step: int) -> Any:
        return base_lr * self.lr_lambdas[0](step)

    def rates(self, step: int) -> list[Any]:
        added = len(self.base_lrs) - len(self.lr_lambdas)  # param groups, which follow the last function
        functions = [*self.lr_lambdas, *self.lr_lambdas[-1:] * added]
        return [base * of(step) for base, of in zip(self.base_lrs, functions, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The state; of the functions that of objects, as PyTorch's has it."""
        state = super().state_dict()
        state["lr_lambdas"] = [
            None if isinstance(of, FunctionType) else dict(vars(of)) for of in self.lr_lambdas
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        state = dict(state_dict)
        for of, attributes in zip(self.lr_lambdas, state.pop("lr_lambdas", ()), strict=False):
            if attributes is not None:
                vars(of).update(attributes)
        super().load_state_dict(state)


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


# --- PyTorch's, by OneFlow's argument names ---------------------------------------------------------------------------


class _OfTorch(of_torch.LRScheduler):
    verbose = False
    of_graph = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go one step on, after the optimizer's. One that a graph steps does not go on twice for a step."""
        if not _may_go_on(self):
            return
        super().step(*args, **kwargs)
        _went_on(self)
        if self.verbose:
            for index, group in enumerate(self.optimizer.param_groups):
                _tell(self, index, group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        return {key: value for key, value in super().state_dict().items() if key != _OF_GRAPH}

    @property
    def last_step(self) -> int:
        """The step that the present rate belongs to."""
        return self.last_epoch


class MultiplicativeLR(_OfTorch, of_torch.MultiplicativeLR):
    """Each step multiplies the rate by `lr_lambda(step)`."""

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Any, last_step: int = -1, verbose: bool = False
    ) -> None:
        self.verbose = verbose
        of_torch.MultiplicativeLR.__init__(self, optimizer, lr_lambda, last_step)


class CyclicLR(_OfTorch, of_torch.CyclicLR):
    """`torch.optim.lr_scheduler.CyclicLR`, with `last_step` and `verbose`."""

    def __init__(self, *args: Any, last_step: int = -1, verbose: bool = False, **kwargs: Any) -> None:
        self.verbose = verbose
        of_torch.CyclicLR.__init__(self, *args, **kwargs, last_epoch=last_step)  # type: ignore[misc]


class OneCycleLR(_OfTorch, of_torch.OneCycleLR):
    """`torch.optim.lr_scheduler.OneCycleLR`, with `last_step` and `verbose`."""

    def __init__(self, *args: Any, last_step: int = -1, verbose: bool = False, **kwargs: Any) -> None:
        self.verbose = verbose
        of_torch.OneCycleLR.__init__(self, *args, **kwargs, last_epoch=last_step)  # type: ignore[misc]


class ReduceLROnPlateau(_OfTorch, of_torch.ReduceLROnPlateau):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau`, with `verbose`; call `step(metric)` yourself."""

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Any = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Any = "rel",
        cooldown: int = 0,
        min_lr: Any = 0,
        eps: float = 1e-8,
        verbose: bool = False,
    ) -> None:
        self.verbose = verbose
        of_torch.ReduceLROnPlateau.__init__(
            self, optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps
        )


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


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise OptimizerError(f"{name} is {value}", hint="it must be greater than zero")
    return value


def _fraction(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise OptimizerError(f"{name} is {value}", hint="it must be between 0 and 1")
    return value
