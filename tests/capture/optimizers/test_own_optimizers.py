"""Optimizers that torch does not have: bitwise eager after each step, or refused by name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch.optim import (
    Adafactor,
    Adam,
    Optimizer,
    RAdam,
)

import monograph as mg
from monograph.errors import CaptureError
from tests.capture.optimizers.rows import Lion, LionWithCounter
from tests.support import Side, assert_same
from tests.support.small import (
    TrainStep,
    batches,
    check_parity,
    eager_trail,
    graph_trail,
    make_side,
    one_thread,  # noqa: F401
    record,
)


class LionWithNewTensors(Lion):
    """The momentum is another tensor after each step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        direction = (first * state["momentum"] + (1 - first) * parameter.grad).sign()
        parameter.sub_(group["lr"] * direction)
        state["momentum"] = second * state["momentum"] + (1 - second) * parameter.grad


class LionWithSquareRoot(LionWithCounter):
    """`math.sqrt` of a number that moves, as many optimizers write their bias correction."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
        state["step"] += 1
        rate = group["lr"] * math.sqrt(1 - group["betas"][1] ** state["step"])
        parameter.add_(parameter.grad.sign(), alpha=-rate * math.pow(0.9, state["step"]))


class LionWithDecay(Lion):
    """A counter that is a Python float, multiplied at each step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["weight"] = 1.0
        state["weight"] *= group["betas"][0]
        parameter.add_(parameter.grad.sign(), alpha=-group["lr"] * state["weight"])


class LionEverySecondStep(Lion):
    """Branches on its own counter: two ways to step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
        state["step"] += 1
        if state["step"] % 2 == 0:
            parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        else:
            parameter.add_(parameter.grad, alpha=-group["lr"])


class LionFromFirstGradient(Lion):
    """The momentum starts as the first gradient: the first step is its own."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum" not in state:
            state["momentum"] = parameter.grad.clone()
        else:
            state["momentum"].lerp_(parameter.grad, 1 - group["betas"][1])
        parameter.add_(state["momentum"].sign(), alpha=-group["lr"])


class LionThatSkipsItsFirstStep(Lion):
    """The first step only makes the state, as SOAP does: finding it there would be another step."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            return
        super().update(parameter, state, group)


class LionWithNestedState(Lion):
    """Lists and dicts of tensors and numbers in the state."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["sums"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            state["more"] = {"step": 0, "last": torch.zeros_like(parameter)}
        sums, more = state["sums"], state["more"]
        sums[0].add_(parameter.grad)
        sums[1] = sums[0] * 2
        more["step"] += 1
        parameter.add_(sums[1] - more["last"], alpha=-group["lr"] / more["step"])
        more["last"] = more["last"] + parameter.grad


class LionWithSharedState(Lion):
    """State that belongs to no parameter; it appears in the first step, which is therefore its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["shared"]
        if not shared:
            shared["norm"] = torch.zeros(())
            shared["step"] = 0
        shared["step"] += 1
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        shared["norm"] += torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / shared["norm"] * shared["step"] * self.param_groups[0]["lr"])


class LionWithHistory(Lion):
    """A window of the last gradients, which grows for three steps."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["window"] = torch.zeros(0, *parameter.shape)
        state["window"] = torch.cat([state["window"], parameter.grad[None]])[-3:]
        parameter.add_(state["window"].mean(0), alpha=-group["lr"])


class LionWithNoise(Lion):
    """Draws random numbers, and asks for state that it leaves empty."""

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_((parameter.grad + torch.randn_like(parameter)) * group["lr"])


class LionOnTopOfAdam(Adam):
    """Another optimizer's step between changes of gradients and of parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter.detach().sign(), alpha=0.01)
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-1, 1)
        return result


class LionWithDefaults(Lion):
    """Reads a number of its own, and one of its defaults."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = 1.0

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad.sign() * self.scale * self.defaults["lr"])


class LionWithGroupCounter(Lion):
    """The counter is in the param group, as in schedule-free optimizers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["step"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"] / group["step"] ** 0.5)


class LionWithGroupSum(Lion):
    """A running sum of learning rates in the param group: a float that the step itself changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["lr_sum"] = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr_sum"] += group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-(group["lr"] ** 2) / group["lr_sum"])


class LionWithOwnCounter(Lion):
    """The counter is an attribute of the optimizer itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps_done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps_done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"] / self.steps_done)


CUSTOM = [
    (Lion, 1),
    (LionWithNewTensors, 1),
    (LionWithCounter, 1),
    (LionWithSquareRoot, 1),
    (LionWithDecay, 1),
    (LionEverySecondStep, 2),
    (LionFromFirstGradient, 2),
    (LionThatSkipsItsFirstStep, 2),
    (LionWithNestedState, 1),
    (LionWithSharedState, 2),
    (LionWithHistory, 4),
    (LionWithNoise, 1),
    (LionOnTopOfAdam, 1),
    (LionWithGroupCounter, 1),
    (LionWithGroupSum, 1),
]


@pytest.mark.parametrize(("kind", "builds"), CUSTOM)
def test_an_optimizer_of_ones_own(kind: type[Optimizer], builds: int) -> None:
    check_parity(lambda: make_side(lambda m: kind(m.parameters())), builds=builds)


class LionThatDropsState(Lion):
    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        del state["momentum"]


class LionWithMovingList(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["history"] = [0.1, 0.2]

    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["history"][0] *= 1.5


class LionWithMovingBetas(Lion):
    def update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])


REFUSED = [
    (LionThatDropsState, "optimizer.0/model.tokens.weight/momentum"),
    (LionWithMovingList, "optimizer.0/group0/history"),
    (LionWithMovingBetas, "optimizer.0/group0/betas"),
]


def test_an_optimizer_that_counts_in_an_attribute_counts_as_in_eager_mode() -> None:
    data = batches(3)
    side = make_side(lambda model: LionWithOwnCounter(model.parameters()), scheduler=None)
    other = make_side(lambda model: LionWithOwnCounter(model.parameters()), scheduler=None)
    assert_same(eager_trail(other, data), graph_trail(side, TrainStep(side), data))
    assert side.optimizer.steps_done == other.optimizer.steps_done == 3


def test_a_decay_above_one_is_told() -> None:
    """The bias correction would be negative, and its square root no real number."""
    side = make_side(lambda model: Adam(model.parameters()), scheduler=None)
    step = TrainStep(side)
    (batch,) = batches(1)
    loss = step(*batch)
    side.optimizer.param_groups[0]["betas"] = (0.9, 1.1)
    before = record(side, loss)
    with pytest.raises(CaptureError, match=r"betas/1 .*<= 1\.0` is no longer taken"):
        step(*batch)
    assert_same(before, record(side, loss))
    side.optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    step(*batch)
    assert len(step.builds) == 1


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_what_an_optimizer_may_not_change_is_refused_by_name(kind: type[Optimizer], name: str) -> None:
    side = make_side(lambda m: kind(m.parameters()))
    if kind is LionThatDropsState:  # state that is there before
        for parameter in side.model.parameters():
            side.optimizer.state[parameter]["momentum"] = torch.zeros_like(parameter)
    before = record(side, torch.zeros(()))
    with pytest.raises(CaptureError, match=re.escape(name)):
        TrainStep(side)(*batches(1)[0])
    assert_same(before, record(side, torch.zeros(())))


def test_numbers_of_an_optimizer_of_ones_own_are_guarded_facts() -> None:
    def change(index: int, side: Side) -> None:
        side.optimizer.scale = (1.0, 0.5, 0.5, 0.5, 0.5, 0.5)[index]
        side.optimizer.defaults["lr"] = (0.01, 0.01, 0.01, 0.05, 0.05, 0.05)[index]

    check_parity(lambda: make_side(lambda m: LionWithDefaults(m.parameters())), builds=3, between=change)


@pytest.mark.parametrize("kind", [Lion, LionWithNewTensors, LionWithCounter, LionFromFirstGradient])
def test_an_optimizer_of_ones_own_starts_warm(kind: type[Optimizer]) -> None:
    steps = batches(6)
    expected = eager_trail(make_side(lambda m: kind(m.parameters())), steps)
    side = make_side(lambda m: kind(m.parameters()))
    step = TrainStep(side)
    got = eager_trail(side, steps[:2]) + graph_trail(side, step, steps[2:])
    assert_same(expected, got)
    assert len(step.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [Adam, Adafactor, RAdam, Lion, LionWithCounter, LionWithGroupCounter])
def test_two_steps_in_one_build(kind: type[Optimizer]) -> None:
    """`build()` steps the optimizer itself, twice. RAdam's branch falls between the two steps of the third call."""

    class Twice(TrainStep):
        def __init__(self, side: Side) -> None:
            mg.Graph.__init__(self)
            self.model = side.model
            self.add_optimizer(side.optimizer, manual=True)
            self.optimizer = side.optimizer

        def build(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            super().build(tokens, target)
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss = super().build(tokens, target)
            self.optimizer.step()
            return loss

    def make() -> Side:
        return make_side(lambda m: kind(m.parameters()), scheduler=None)

    doubled = [batch for batch in batches(4) for _ in range(2)]
    side = make()
    step = Twice(side)
    assert_same(eager_trail(make(), doubled)[1::2], graph_trail(side, step, batches(4)))
    assert len(step.builds) == (3 if kind is RAdam else 1)
