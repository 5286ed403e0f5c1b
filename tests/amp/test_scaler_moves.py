"""What moves a gradient scaler between the steps of a graph, and scalers whose scale never moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from tests.amp.mixed import (
    Recipe,
    Side,
    Step,
    adamw,
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


def test_a_replayed_step_asks_for_no_value() -> None:
    recipe = Recipe(sgd, scaler=growing, amp=torch.float16, decay=0.9)
    step = Step(recipe, recipe.side())
    first, *others = infinite_at(2, 3)
    step(*first)
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        for batch in others:
            step(*batch)
    assert torch.ops.aten._amp_update_scale.default in seen
    assert torch.ops.aten._local_scalar_dense.default not in seen
    assert len(step.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("change", "builds"),
    [
        (lambda s: s.scaler.update(torch.tensor(128.0)), 1),
        (
            lambda s: s.scaler.load_state_dict(
                {**s.scaler.state_dict(), "scale": 32.0, "_growth_tracker": 1}
            ),
            1,
        ),
        (lambda s: s.scaler.load_state_dict({**s.scaler.state_dict(), "growth_factor": 3.0}), 2),
        (lambda s: s.scaler.set_growth_factor(3.0), 2),
        (lambda s: s.scaler.set_backoff_factor(0.1), 2),
        (lambda s: vars(s.scaler).update(_scale=torch.tensor(8.0)), 1),
        (lambda s: vars(s.scaler).update(_enabled=False), 2),
        (lambda s: s.scaler.set_growth_factor(s.scaler.get_growth_factor() * 1.0), 1),
    ],
    ids=[
        "update",
        "load",
        "load factor",
        "growth",
        "backoff",
        "scale",
        "off",
        "equal",
    ],
)
def test_what_a_user_does_to_the_scaler_is_followed(change: Callable[[Side], None], builds: int) -> None:
    check(Recipe(adamw, scaler=growing), infinite_at(4), after(1, change), builds=builds, eager=False)


@pytest.mark.long
def test_the_scaler_is_replaced_and_taken_away() -> None:
    def between(index: int, side: Side) -> None:
        if index in (1, 3):
            side.scaler = growing() if index == 1 else None
            if graphs:
                graphs[0].set_grad_scaler(side.scaler)

    graphs: list[Step] = []
    recipe, batches = Recipe(adamw, scaler=growing), infinite_at(2)
    expected = plain_trail(recipe, batches, between)
    side = recipe.side()
    graphs.append(Step(recipe, side))
    assert_same(expected, trail(side, graphs[0], batches, between), "step")
    assert len(graphs[0].builds) == 3


class Constant:
    """What a scale that never moves means, in plain PyTorch."""

    def __init__(self, scale: float) -> None:
        self.factor, self.unscaled = scale, False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1.0 / self.factor)
        self.unscaled = True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.unscaled:
            self.unscale_(optimizer)
        optimizer.step()

    def update(self) -> None:
        self.unscaled = False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": float(self.factor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["scale"]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.one_case
@pytest.mark.parametrize("change", [None, clip], ids=["", "clip"])
@pytest.mark.parametrize("scale", [1000.0, 64])
def test_a_static_scaler(scale: float, change: Any) -> None:
    """Loaded with another scale it makes a build: the scale is a constant."""
    other = after(2, lambda side: side.scaler.load_state_dict({"scale": 24.0}))
    made = Recipe(sgd, scaler=lambda: Constant(scale), unscaled=change, amp=torch.bfloat16)
    recipe = dataclasses.replace(made, scaler=lambda: mg.amp.StaticGradScaler(scale))
    expected = plain_trail(made, infinite_at(count=5), other)
    assert_same(expected, plain_trail(recipe, infinite_at(count=5), other), "our class in plain code")
    for eager in (True, False):
        side = recipe.side()
        step = Step(recipe, side)
        assert_same(expected, trail(side, step.eager if eager else step, infinite_at(count=5), other), "step")
    assert len(step.builds) == 2


@pytest.mark.one_case
@pytest.mark.parametrize("change", [None, clip], ids=["", "clip"])
def test_a_scaler_that_is_switched_off(change: Any) -> None:
    check(Recipe(adamw, scaler=lambda: torch.amp.GradScaler("cpu", enabled=False), unscaled=change))
