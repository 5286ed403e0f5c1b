"""Several optimizers, their hooks, and changes between steps: bitwise eager after each step."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    SGD,
    Adam,
    AdamW,
    Optimizer,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

import monograph as mg
from monograph.errors import OptimizerError
from tests.capture.optimizers.rows import LionWithCounter, Row
from tests.support import Side, assert_same
from tests.support.small import (
    Classifier,
    TrainStep,
    batches,
    check_parity,
    eager_trail,
    graph_trail,
    loss_of,
    make_side,
    one_thread,  # noqa: F401
    record,
    shrinking,
)


def test_two_optimizers_with_a_scheduler_each() -> None:
    def optimizers(model: nn.Module) -> tuple[Optimizer, Optimizer]:
        return SGD(model.tokens.parameters(), lr=0.1, momentum=0.9), AdamW(model.layers.parameters())

    class Both(mg.Graph):
        def __init__(self, sides: list[Side]) -> None:
            super().__init__()
            self.model = sides[0].model
            for side in sides:
                self.add_optimizer(side.optimizer, lr_sch=side.scheduler)

        def build(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = loss_of(self.model, tokens, target)
            loss.backward()
            return loss

    def make() -> list[Side]:
        torch.manual_seed(0)
        model = Classifier()
        return [Side(model, held, shrinking(held)) for held in optimizers(model)]

    eager, graph = make(), make()
    step = Both(graph)
    for batch in batches():
        eager[0].model.zero_grad()
        loss = loss_of(eager[0].model, *batch)
        loss.backward()
        for side in eager:
            side.optimizer.step()
            side.scheduler.step()
        got = step(*batch)
        for expected, side in zip(eager, graph, strict=True):
            assert_same(record(expected, loss), record(side, got))
    assert len(step.builds) == 1


def scale_gradients(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def shrink_parameters(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)


def test_hooks_around_the_step_are_part_of_the_graph() -> None:
    def make() -> Side:
        side = make_side(lambda m: Adam(m.parameters()))
        side.optimizer.register_step_pre_hook(scale_gradients)
        side.optimizer.register_step_post_hook(shrink_parameters)
        return side

    check_parity(make)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_that_comes_and_goes_is_followed(name: str) -> None:
    hook = scale_gradients if name == "register_step_pre_hook" else shrink_parameters
    handles: list[Any] = []

    def change(index: int, side: Side) -> None:
        if index == 1:
            handles.append(getattr(side.optimizer, name)(hook))
        if index == 3:
            handles.pop().remove()

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=2, between=change)


def test_a_hook_of_all_optimizers_is_followed() -> None:
    handles: list[Any] = []

    def change(index: int, side: Side) -> None:
        if index == 1:
            handles.append(register_optimizer_step_post_hook(shrink_parameters))
        if index == 3:
            handles.pop().remove()

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=2, between=change)


@pytest.mark.parametrize(
    "row", [Row(Adam, {}), Row(SGD, {"lr": 0.1, "momentum": 0.9}), Row(LionWithCounter, {})], ids=str
)
def test_loaded_state_is_taken_over(row: Row) -> None:
    other = make_side(row.make)
    eager_trail(other, batches(3))
    saved = copy.deepcopy(other.optimizer.state_dict())

    def load(index: int, side: Side) -> None:
        if index == 2:
            side.optimizer.load_state_dict(copy.deepcopy(saved))

    check_parity(lambda: make_side(row.make), builds=1, between=load)


def test_state_that_is_cleared_starts_anew() -> None:
    def clear(index: int, side: Side) -> None:
        if index == 2:
            side.optimizer.state.clear()

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=1, between=clear)


def test_a_param_group_that_is_added_is_trained() -> None:
    def add(index: int, side: Side) -> None:
        if index == 2:
            side.optimizer.add_param_group({"params": side.model.tokens.parameters(), "lr": 0.05})

    check_parity(
        lambda: make_side(lambda m: Adam(m.layers.parameters()), scheduler=None), builds=2, between=add
    )


def test_a_parameter_that_is_frozen_between_steps_stays() -> None:
    def freeze(index: int, side: Side) -> None:
        side.model.tokens.weight.requires_grad_(index not in (1, 2))

    check_parity(lambda: make_side(lambda m: Adam(m.parameters())), builds=2, between=freeze)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_no_graph_can_hold_is_refused_by_name(kind: type[Optimizer]) -> None:
    side = make_side(lambda m: kind(m.parameters()), scheduler=None)
    with pytest.raises(OptimizerError, match=kind.__name__):
        TrainStep(side)


class HalfOfTheFirst(SGD):
    """A step of the user's own that looks like torch's: its first momentum is half of the gradient."""

    @functools.wraps(SGD.step)
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    first = "momentum_buffer" not in state
                    state["momentum_buffer"] = (
                        parameter.grad * 0.5 if first else state["momentum_buffer"] + parameter.grad
                    )
                    parameter.sub_(state["momentum_buffer"], alpha=group["lr"])


def test_a_step_that_wraps_torchs_is_not_taken_for_it() -> None:
    def make(model: nn.Module) -> Optimizer:
        return HalfOfTheFirst(model.parameters(), lr=0.1, momentum=0.9)

    eager, side = make_side(make), make_side(make)
    expected = eager_trail(eager, batches())
    assert_same(expected, graph_trail(side, TrainStep(side), batches()))


@pytest.mark.parametrize("steps", [1, 5])
def test_what_a_scheduler_kept_in_a_group_may_go(steps: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = mg.train_graph(model, nn.MSELoss(), optimizer)
    x = torch.ones(3, 2)
    for _ in range(steps):
        step(x, x)
        scheduler.step()
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0].pop("initial_lr")
    weight = model.weight.detach().clone()
    (gradient,) = torch.autograd.grad(nn.MSELoss()(model(x), x), model.weight)
    step(x, x)
    assert torch.equal(model.weight, weight.add(gradient, alpha=-0.1))
    del optimizer.param_groups[0]["lr"]
    with pytest.raises(KeyError, match="lr"):
        step(x, x)
