"""Schedulers with a formula for the rate: constant, linear, in steps, exponential, polynomial, cosine, or the user's."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch.optim import Optimizer

from monograph.errors import OptimizerError
from monograph.schedulers.scheduler import LRScheduler


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


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise OptimizerError(f"{name} is {value}", hint="it must be greater than zero")
    return value


def _fraction(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise OptimizerError(f"{name} is {value}", hint="it must be between 0 and 1")
    return value
