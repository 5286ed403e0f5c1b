"""Accumulation by hand: gradients that stay from call to call, as eager mode lets them, against the plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support import assert_same

EVERY = 3


class Side:
    def __init__(self, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )
        self.model[4].bias.requires_grad_(False)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.05)

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "gradients": [None if p.grad is None else p.grad.clone() for p in self.model.parameters()],
            "rng": torch.get_rng_state(),
        }

    def update(self, *, to_none: bool) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)


class Backward(mg.Graph):
    """No optimizer: the user's loop updates."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.model = side.model
        self.config.keep_gradients()

    def build(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        (loss / EVERY).backward()
        return loss


class Manual(mg.Graph):
    """The optimizer is stepped in some of the calls."""

    def __init__(self, side: Side, to_none: bool) -> None:
        super().__init__()
        self.model, self.to_none = side.model, to_none
        self.add_optimizer(side.optimizer, manual=True)
        self.optimizer = side.optimizer
        self.config.keep_gradients()

    def build(self, x, y, update=False):
        loss = F.cross_entropy(self.model(x), y)
        (loss / EVERY).backward()
        if update:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.to_none)
        return loss


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def plain_loop(count: int, *, to_none: bool, optimizer: str = "AdamW") -> list[dict[str, Any]]:
    side = Side(optimizer)
    torch.manual_seed(1)
    trail = []
    for index, (x, y) in enumerate(batches(count)):
        loss = F.cross_entropy(side.model(x), y)
        (loss / EVERY).backward()
        if index % EVERY == EVERY - 1:
            side.update(to_none=to_none)
        trail.append({"loss": loss.detach(), **side.state()})
    return trail


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_the_users_own_update(to_none: bool, eager: bool) -> None:
    expected = plain_loop(8, to_none=to_none)
    side = Side()
    backward = Backward(side)
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(8)):
        loss = backward.eager(x, y) if eager else backward(x, y)
        if index % EVERY == EVERY - 1:
            side.update(to_none=to_none)
        assert_same(expected[index], {"loss": loss.detach(), **side.state()}, f"call {index}")
    if not eager:
        assert len(backward.builds) == 2
        assert "gradients that are there" in backward.builds[1].reason


@pytest.mark.one_case
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_an_optimizer_that_steps_in_some_calls(optimizer: str, to_none: bool, eager: bool) -> None:
    expected = plain_loop(8, to_none=to_none, optimizer=optimizer)
    side = Side(optimizer)
    step = Manual(side, to_none)
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(8)):
        loss = (step.eager if eager else step)(x, y, update=index % EVERY == EVERY - 1)
        assert_same(expected[index], {"loss": loss.detach(), **side.state()}, f"call {index}")
    if not eager:
        assert len(step.builds) == 3, step.explain()


def test_a_gradient_is_added_to_in_place() -> None:
    side = Side()
    backward = Backward(side)
    (x, y), *_ = batches(1)
    backward(x, y)
    held = side.model[0].weight.grad
    backward(x, y)
    assert side.model[0].weight.grad is held


def test_a_gradient_laid_out_otherwise_is_another_build() -> None:
    pure, side = Side(), Side()
    backward = Backward(side)
    (x, y), *_ = batches(1)
    for model in (pure.model, side.model):
        model[0].weight.grad = torch.ones(6, 8).t()
    torch.manual_seed(1)
    (F.cross_entropy(pure.model(x), y) / EVERY).backward()
    torch.manual_seed(1)
    backward(x, y)
    assert_same(pure.state(), side.state())
    assert pure.model[0].weight.grad.stride() == side.model[0].weight.grad.stride()


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_parameter_that_is_frozen_in_between(eager: bool) -> None:
    """Clipping and the optimizer look at every gradient that is there, of frozen parameters too."""

    def freeze(model: Any, index: int) -> None:
        if index in (1, 4):
            model[0].weight.requires_grad_(index == 4)

    pure, side = Side(), Side()
    step = Manual(side, True)
    expected = []
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(8)):
        loss = F.cross_entropy(pure.model(x), y)
        (loss / EVERY).backward()
        if index % EVERY == EVERY - 1:
            pure.update(to_none=True)
        expected.append({"loss": loss.detach(), **pure.state()})
        freeze(pure.model, index)
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(8)):
        loss = (step.eager if eager else step)(x, y, update=index % EVERY == EVERY - 1)
        got = {"loss": loss.detach(), **side.state()}
        for state in (expected[index], got):
            state["optimizer"]["state"] = dict(sorted(state["optimizer"]["state"].items()))
        assert_same(expected[index], got, f"call {index}")
        freeze(side.model, index)


def test_the_gradient_of_a_frozen_parameter_is_cleared_with_the_others() -> None:
    """Clipping looks at it too."""
    pure, side = Side(), Side()
    (x, y), *_ = batches(1)
    for model in (pure.model, side.model):
        model[4].bias.grad = torch.full((3,), 0.2)
    torch.manual_seed(1)
    (F.cross_entropy(pure.model(x), y) / EVERY).backward()
    pure.update(to_none=True)
    torch.manual_seed(1)
    Manual(side, True)(x, y, update=True)
    assert side.model[4].bias.grad is None
    assert_same(pure.state(), side.state())


def test_gradients_that_change_places() -> None:
    class Square(Side):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def swapped(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        a, b = model[0].weight, model[2].weight
        a.grad, b.grad = b.grad, a.grad
        return loss

    class Swapping(Backward):
        def build(self, x, y):
            return swapped(self.model, x)

    pure, side = Square(), Square()
    step = Swapping(side)
    for x, y in batches(4):
        swapped(pure.model, x)
        step(x, y)
        for name, parameter in pure.model.named_parameters():
            assert_same(parameter.grad, side.model.get_parameter(name).grad, name)


def test_one_tensor_as_two_gradients_is_refused() -> None:
    side = Side()
    side.model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    step = Backward(side)
    (x, y), *_ = batches(1)
    y = y % 3
    step(x, y)
    step(x, y)
    side.model[0].weight.grad = side.model[2].weight.grad
    with pytest.raises(mg.AliasError, match=r"model\.0\.weight and model\.2\.weight"):
        step(x, y)


@pytest.mark.one_case
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_unscaled_gradients_do_not_stay(eager: bool) -> None:
    """Reading a gradient unscales it; the next call would add scaled ones."""

    class Reading(Manual):
        def build(self, x, y, update=False):
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            norm = self.model[0].weight.grad.norm()
            if update:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return norm

    side = Side()
    step = Reading(side, True)
    step.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=64.0))
    run = step.eager if eager else step
    (x, y), *_ = batches(1)
    with pytest.raises(mg.CaptureError, match="in a call that does not step it"):
        run(x, y)
    side.model.zero_grad()
    run(x, y, update=True)


@pytest.mark.long
def test_interrupted_between_two_updates(tmp_path: Any) -> None:
    """The gradients are part of the state."""
    expected = plain_loop(8, to_none=True)
    side = Side()
    step = Manual(side, True)
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(8)[:4]):
        step(x, y, update=index % EVERY == EVERY - 1)
    mg.save(step.state_dict(), tmp_path / "checkpoint")
    again = Side()
    step = Manual(again, True)
    torch.manual_seed(77)
    step.load_state_dict(mg.load(tmp_path / "checkpoint"))
    for index, (x, y) in list(enumerate(batches(8)))[4:]:
        loss = step(x, y, update=index % EVERY == EVERY - 1)
        assert_same(expected[index], {"loss": loss.detach(), **again.state()}, f"call {index}")


def test_without_being_asked_gradients_do_not_stay() -> None:
    class Forgetful(Manual):
        def __init__(self, side: Side) -> None:
            super().__init__(side, True)
            self.config.keep_gradients(False)

    with pytest.raises(mg.OptimizerError, match="never calls its step") as caught:
        Forgetful(Side())(*batches(1)[0])
    assert "keep_gradients" in caught.value.hint


def test_an_automatic_optimizer_begins_each_step_without_gradients() -> None:
    class Automatic(mg.Graph):
        def __init__(self, side: Side) -> None:
            super().__init__()
            self.model = side.model
            self.add_optimizer(side.optimizer)
            self.config.keep_gradients()

        def build(self, x, y):
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

    pure, side = Side(), Side()
    step = Automatic(side)
    torch.manual_seed(1)
    expected = []
    for x, y in batches(3):
        pure.optimizer.zero_grad()
        loss = F.cross_entropy(pure.model(x), y)
        loss.backward()
        pure.optimizer.step()
        expected.append({"loss": loss.detach(), **pure.state()})
    torch.manual_seed(1)
    for wanted, (x, y) in zip(expected, batches(3), strict=True):
        assert_same(wanted, {"loss": step(x, y).detach(), **side.state()})
    assert len(step.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_scheduler_steps_when_its_optimizer_does(eager: bool) -> None:
    side = Side("SGD")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.5)

    class Scheduled(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = side.model
            self.add_optimizer(side.optimizer, lr_sch=scheduler, manual=True)
            self.optimizer = side.optimizer
            self.config.keep_gradients()

        def build(self, x, times):
            self.model(x).square().mean().backward()
            for _ in range(times):
                self.optimizer.step()

    step = Scheduled()
    (x, _), *_ = batches(1)
    for times, epochs in ((0, 0), (1, 1), (2, 3), (0, 3)):
        (step.eager if eager else step)(x, times)
        assert scheduler.last_epoch == epochs
