"""Every learning-rate scheduler of torch beside a graph: it steps on the host, and the graph follows its numbers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from monograph.errors import OptimizerError
from tests.support import Side, assert_same
from tests.support.small import (
    TrainStep,
    batches,
    check_parity,
    eager_trail,
    graph_trail,
    make_side,
    one_thread,  # noqa: F401
)


def momentum(model: torch.nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: torch.nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def tensor_lr(model: torch.nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=torch.tensor(0.01))


def two_groups(model: torch.nn.Module) -> Optimizer:
    groups = [{"params": model.tokens.parameters()}, {"params": model.layers.parameters(), "lr": 0.003}]
    return RMSprop(groups, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Row:
    """A scheduler for each optimizer that it can drive; one build serves all its numbers."""

    make: Callable[[Optimizer], LRScheduler]
    optimizers: tuple[Callable[[torch.nn.Module], Optimizer], ...] = (momentum, tensor_lr, two_groups)

    @property
    def kind(self) -> type[LRScheduler]:
        return type(self.make(adam(torch.nn.Linear(1, 1))))


def warm_then_decay(optimizer: Optimizer) -> SequentialLR:
    return SequentialLR(
        optimizer,
        [LinearLR(optimizer, start_factor=0.1, total_iters=2), ExponentialLR(optimizer, gamma=0.7)],
        milestones=[3],
    )


def chained(optimizer: Optimizer) -> ChainedScheduler:
    return ChainedScheduler(
        [ConstantLR(optimizer, factor=0.3, total_iters=2), ExponentialLR(optimizer, gamma=0.9)], optimizer
    )


ROWS = {
    "lambda": Row(lambda o: LambdaLR(o, lambda step: 0.9**step)),
    "multiplicative": Row(lambda o: MultiplicativeLR(o, lambda step: 0.9 + 0.01 * step)),
    "step": Row(lambda o: StepLR(o, step_size=2, gamma=0.5)),
    "multi_step": Row(lambda o: MultiStepLR(o, milestones=[1, 4], gamma=0.5)),
    "constant": Row(lambda o: ConstantLR(o, factor=0.5, total_iters=3)),
    "linear": Row(lambda o: LinearLR(o, start_factor=0.2, total_iters=4)),
    "exponential": Row(lambda o: ExponentialLR(o, gamma=0.8)),
    "polynomial": Row(lambda o: PolynomialLR(o, total_iters=4, power=2.0)),
    "cosine": Row(lambda o: CosineAnnealingLR(o, T_max=4, eta_min=1e-4)),
    "warm_restarts": Row(lambda o: CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2)),
    "cyclic": Row(lambda o: CyclicLR(o, 0.001, 0.1, step_size_up=2), (momentum, adam)),
    "cyclic_exp": Row(
        lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9, cycle_momentum=False),
        (momentum, tensor_lr, two_groups),
    ),
    "one_cycle": Row(lambda o: OneCycleLR(o, max_lr=0.1, total_steps=8), (momentum, adam, two_groups)),
    "one_cycle_linear": Row(
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=8, anneal_strategy="linear", three_phase=True),
        (momentum, adam, tensor_lr),
    ),
    "sequential": Row(warm_then_decay),
    "chained": Row(chained),
    "swa": Row(lambda o: SWALR(o, swa_lr=0.001, anneal_epochs=4)),
    "swa_linear": Row(lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3, anneal_strategy="linear")),
}
CASES = [
    pytest.param(row, optimizer, id=f"{name}-{optimizer.__name__}")
    for name, row in ROWS.items()
    for optimizer in row.optimizers
]


@pytest.mark.parametrize(("row", "optimizer"), CASES)
def test_the_graph_follows_the_scheduler(row: Row, optimizer: Callable[[torch.nn.Module], Optimizer]) -> None:
    expected = eager_trail(make_side(optimizer, row.make), batches())
    side = make_side(optimizer, row.make)
    step = TrainStep(side)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*optimizer.step.*")
        got = graph_trail(side, step, batches())
    assert_same(expected, got)
    assert len(step.builds) == 1, step.explain()
    rates = {tuple(state["lr"]) for state in got}
    assert len(rates) > 1, "a test of a schedule must move the learning rate"


def test_no_scheduler_of_torch_is_forgotten() -> None:
    kinds = {
        kind
        for kind in vars(lr_scheduler).values()
        if inspect.isclass(kind)
        and issubclass(kind, LRScheduler)
        and kind.__module__ == lr_scheduler.__name__
    }
    assert {row.kind for row in ROWS.values()} | {ReduceLROnPlateau} == {
        kind for kind in kinds if not kind.__name__.startswith("_")
    } - {LRScheduler} | {SWALR}


@pytest.mark.parametrize("optimizer", [momentum, tensor_lr, two_groups])
def test_a_scheduler_that_needs_a_metric_is_stepped_by_the_user(
    optimizer: Callable[[torch.nn.Module], Optimizer],
) -> None:
    """The metric gets worse at each step, so the rate falls as soon as the patience is over."""
    followed: list[
        tuple[Side, ReduceLROnPlateau]
    ] = []  # holds the sides: an id may come again once one is freed

    def follow(index: int, side: Side) -> None:
        if not any(known is side for known, _ in followed):
            followed.append((side, ReduceLROnPlateau(side.optimizer, factor=0.5, patience=1)))
        (plateau,) = (plateau for known, plateau in followed if known is side)
        plateau.step(float(index))

    step = check_parity(lambda: make_side(optimizer, None), between=follow)
    assert step.builds[0].captured.steps == {"optimizer.0": 1}


def test_a_scheduler_that_needs_a_metric_is_refused_in_the_graph() -> None:
    side = make_side(adam, lambda o: ReduceLROnPlateau(o))
    with pytest.raises(OptimizerError, match="ReduceLROnPlateau"):
        TrainStep(side)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    side = make_side(adam, lambda _: ExponentialLR(adam(torch.nn.Linear(1, 1)), 0.9))
    with pytest.raises(OptimizerError, match="another optimizer"):
        TrainStep(side)


def test_a_scheduler_may_be_stepped_outside_of_the_graph() -> None:
    """Once per epoch of two steps, as scripts do; torch does not complain that the optimizer has not stepped."""
    schedulers: dict[int, LRScheduler] = {}

    def follow(index: int, side: Side) -> None:
        if index % 2:
            schedulers[id(side)].step()

    def make() -> Side:
        side = make_side(momentum, None)
        schedulers[id(side)] = StepLR(side.optimizer, step_size=1, gamma=0.5)
        sides.append(side)
        return side

    sides: list[Side] = []  # keeps the ids apart
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*optimizer.step.*")
        check_parity(make, between=follow)


def test_a_scheduler_is_saved_and_loaded_between_steps() -> None:
    def reload(index: int, side: Side) -> None:
        if index == 2:
            saved: dict[str, Any] = side.scheduler.state_dict()
            for _ in range(3):
                side.scheduler.step()
            side.scheduler.load_state_dict(saved)

    check_parity(lambda: make_side(adam, lambda o: CosineAnnealingLR(o, T_max=4)), between=reload)


def test_swa_takes_over_from_another_scheduler() -> None:
    """The usual recipe: cosine first, stepped by the graph; SWALR from the fourth step on, stepped by the user."""
    averaging: dict[int, SWALR] = {}

    def follow(index: int, side: Side) -> None:
        if index == 2:
            averaging[id(side)] = SWALR(side.optimizer, swa_lr=0.02, anneal_epochs=2)
        if index > 2:
            averaging[id(side)].step()

    sides: list[Side] = []

    def make() -> Side:
        sides.append(make_side(momentum, lambda o: CosineAnnealingLR(o, T_max=8)))
        return sides[-1]

    check_parity(make, between=follow)
