"""A gradient scaler in the graph: every optimizer skips steps with infinite gradients, bitwise as in eager mode.

After a first step that was skipped the optimizer in a graph has the state with which its first step will begin, where
plain PyTorch has none yet; numbers are the same from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR

import monograph as mg
from tests.amp.mixed import (
    Classifier,
    Matrices,
    Recipe,
    Step,
    after,
    check,
    growing,
    infinite_at,
    plain_trail,
    sgd,
    trail,
)
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401

# a scheduler moves on when a step is skipped, and torch wonders about it
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@dataclass(frozen=True)
class Row:
    """An optimizer with its options; `builds` where branches on its counters make more than one."""

    kind: type[Optimizer]
    options: dict[str, Any]
    builds: int = 1

    def __str__(self) -> str:
        return f"{self.kind.__name__}({','.join(f'{key}={value}' for key, value in self.options.items())})"

    @property
    def recipe(self) -> Recipe:
        model = Matrices if self.kind is Muon else Classifier
        return Recipe(self.make, model, scaler=growing)

    def make(self, model: nn.Module) -> Optimizer:
        options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return self.kind(model.parameters(), **options)


ROWS = [
    Row(Adadelta, {}),
    Row(Adadelta, {"foreach": True}),
    Row(Adafactor, {}),
    Row(Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    Row(Adagrad, {"lr": 0.05, "fused": True}),
    Row(Adam, {"amsgrad": True}),
    Row(Adam, {"foreach": True}),
    Row(Adam, {"fused": True, "amsgrad": True}),
    Row(AdamW, {"foreach": False}),
    Row(AdamW, {"fused": True}),
    Row(Adamax, {}),
    Row(Adamax, {"foreach": True}),
    Row(ASGD, {"lr": 0.05}),
    Row(ASGD, {"lr": 0.05, "foreach": True, "t0": 2}, builds=2),  # max(1, step - t0)
    Row(Muon, {}),
    Row(NAdam, {}),
    Row(RAdam, {"foreach": True, "betas": (0.9, 0.6)}),
    Row(RMSprop, {"momentum": 0.9, "centered": True}),
    Row(Rprop, {}),
    Row(Rprop, {"foreach": True, "lr": torch.tensor(0.01)}),
    Row(SGD, {"lr": 0.1}),
    Row(SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Row(SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True, "weight_decay": 0.1, "foreach": True}),
]


@pytest.mark.one_case
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_optimizer_skips_steps(row: Row) -> None:
    check(row.recipe, infinite_at(0, 3, 4, count=7), builds=row.builds)


@pytest.mark.one_case
@pytest.mark.parametrize("at", [(), (0, 1), (5,), (0, 1, 2, 3, 4, 5)], ids=str)
def test_infinities_at_any_step(at: tuple[int, ...]) -> None:
    check(Recipe(sgd, scaler=growing), infinite_at(*at), eager=False)


def test_fused_momentum_of_a_first_step_that_is_skipped() -> None:
    """torch leaves that buffer uninitialised, and adds to it later; in a graph it begins as after no step at all."""
    row = Row(SGD, {"lr": 0.1, "momentum": 0.9, "fused": True})
    forgotten = after(0, lambda side: side.optimizer.state.clear())
    expected = plain_trail(row.recipe, infinite_at(0, 3), forgotten)
    side = row.recipe.side()
    step = Step(row.recipe, side)
    assert_same(expected[1:], trail(side, step, infinite_at(0, 3))[1:], "step")
    check(row.recipe, infinite_at(2, 3))


# --- the learning rate moves while steps are skipped -----------------------------------------------------------------


def halving(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "row",
    [
        Row(AdamW, {"lr": torch.tensor(0.01)}),
        Row(Rprop, {}),
        Row(Rprop, {"foreach": True}),
        Row(Rprop, {"lr": torch.tensor(0.01)}),
        Row(ASGD, {"lr": 0.05}),
        Row(ASGD, {"lr": 0.05, "foreach": True}),
    ],
    ids=str,
)
def test_state_begins_with_the_rate_of_the_first_step_that_is_made(row: Row) -> None:
    check(Recipe(row.make, scaler=growing, scheduler=halving), infinite_at(0, 1, 4), eager=False)


def test_a_static_scaler_divides_once_in_each_step() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), mg.amp.StaticGradScaler(8.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1.0, 1.0]
    assert parameter.tolist() == [-2.0, -2.0]


def test_a_scale_that_has_moved_before_goes_on() -> None:
    scaler = growing()
    scaler.load_state_dict(scaler.state_dict() | {"scale": 48.0})
    scaler.scale(torch.ones(()))
    recipe = Recipe(sgd)
    step = Step(recipe, recipe.side())
    step.set_grad_scaler(scaler)
    step(*infinite_at()[0])
    assert scaler.get_scale() == 48.0
