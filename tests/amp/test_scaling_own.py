"""Optimizers of one's own under a gradient scaler: their steps are skipped, or the error names why they cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from monograph.errors import OptimizerError
from tests.amp.mixed import Recipe, Step, adamw, check, growing, infinite_at, plain_trail, trail
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401


class Own(Optimizer):
    """A step that `update` writes, with options of the test's."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                self.begin(group)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.update(parameter, self.state[parameter], group)

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class KeepsGradient(Own):
    """Its state is put anew at each step, and once it is the gradient itself."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(before=torch.zeros_like(parameter), count=torch.zeros(()))
        parameter.sub_((parameter.grad + state["before"]) * group["lr"])
        state["before"], state["count"] = parameter.grad, state["count"] + 1


class ClearsGradients(AdamW):
    """No gradient is left when its step ends."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.zero_grad()


class CountsInState(Own):
    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("count", 0)
        state["count"] += 1
        parameter.sub_(parameter.grad * group["lr"] / state["count"])


class CountsInGroup(Own):
    def begin(self, group: dict[str, Any]) -> None:
        group["count"] += 1

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad * group["lr"] / group["count"])


def with_clamping_hook(model: nn.Module) -> Optimizer:
    optimizer = adamw(model)

    def clamp(*_args: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(clamp)
    return optimizer


@pytest.mark.one_case
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: ClearsGradients(model.parameters(), lr=0.01),
        with_clamping_hook,
    ],
    ids=["clears gradients", "step hook"],
)
def test_an_optimizer_of_ones_own_skips_steps(optimizer: Callable[..., Optimizer]) -> None:
    check(Recipe(optimizer, scaler=growing), infinite_at(0, 3))


def test_state_that_is_a_gradient_is_put_back_and_the_gradient_stays() -> None:
    recipe = Recipe(lambda model: KeepsGradient(model.parameters()), scaler=growing)
    plain: list[Any] = []
    ours: list[Any] = []

    def gradients(found: list[Any]) -> Callable[..., None]:
        return lambda _index, side: found.append([p.grad.clone() for p in side.model.parameters()])

    expected = plain_trail(recipe, infinite_at(2), gradients(plain))
    side = recipe.side()
    step = Step(recipe, side)
    step.config.keep_gradients()
    assert_same(expected, trail(side, step, infinite_at(2), gradients(ours)), "step")
    assert_same(plain, ours, "gradients")
    assert len(step.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda m: CountsInState(m.parameters()), r"CountsInState counts its state/count in Python"),
        (lambda m: CountsInGroup(m.parameters(), count=0), r"CountsInGroup changes count of a param group"),
        (
            lambda m: SGD(m.parameters(), 0.1, 0.9, 0.5),
            r"SGD makes its state/momentum_buffer in its first step",
        ),
        (
            lambda m: SGD(m.parameters(), 0.1, 0.9, 0.5, fused=True),
            r"SGD makes its state/momentum_buffer in its first step",
        ),
    ],
    ids=["in state", "in a group", "dampening", "fused dampening"],
)
def test_a_step_that_cannot_be_skipped_is_named(optimizer: Callable[..., Optimizer], message: str) -> None:
    recipe = Recipe(optimizer, scaler=growing)
    side = recipe.side()
    before = side.state()
    with pytest.raises(OptimizerError, match=message) as raised:
        Step(recipe, side)(*infinite_at()[0])
    assert raised.value.hint
    assert_same(before, side.state())


def test_dampening_after_a_first_step_in_eager_mode() -> None:
    recipe = Recipe(lambda m: SGD(m.parameters(), 0.1, 0.9, 0.5), scaler=growing)
    batches = infinite_at(2, 4)
    expected = plain_trail(recipe, batches)
    side = recipe.side()
    step = Step(recipe, side)
    calls = iter([step.eager, *[step] * 5])
    assert_same(expected, trail(side, lambda x, y: next(calls)(x, y), batches), "step")
