"""What gradient accumulation cannot split is refused by name, or passed whole; attributes are those of the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.capture.accumulation.loop import Odd, Scaled
from tests.support import assert_same

# --- what cannot be split -----------------------------------------------------------------------------------


def test_an_indivisible_batch_is_named() -> None:
    step = Scaled()
    with pytest.raises(mg.SignatureError, match=r'batch\["x"\] has 10 rows.*4 equal'):
        step({"x": torch.randn(10, 6)})
    assert step({"x": torch.randn(8, 6)}).shape == (4,)


def test_a_scalar_is_named() -> None:
    step = Scaled()
    with pytest.raises(mg.SignatureError, match=r"scale has no dimension") as caught:
        step({"x": torch.randn(8, 6)}, torch.tensor(2.0))
    assert "mg.replicated(scale)" in str(caught.value)
    assert step({"x": torch.randn(8, 6)}, mg.replicated(torch.tensor(2.0))).shape == (4,)
    assert step({"x": torch.randn(8, 6)}, 3.0).shape == (4,)


def test_replicated_without_accumulation_is_the_argument_itself() -> None:
    step = Scaled(1)
    x = torch.randn(8, 6)
    assert step(mg.replicated({"x": x})).shape == ()
    step({"x": x})
    assert len(step.builds) == 1


def test_replicated_or_not_are_two_builds() -> None:
    step = Scaled(2)
    x, scale = torch.randn(8, 6), torch.ones(8, 3)[:1].repeat(4, 1)
    for _ in range(2):
        step({"x": x}, mg.replicated(scale))
        step({"x": x}, torch.ones(8, 1))
    assert len(step.builds) == 2
    step({"x": x[:2]}, mg.replicated(scale[:2, :1]))
    step({"x": x[:2]}, scale[:2, :1])
    assert len(step.builds) == 4
    assert "replicated arguments" in step.builds[3].reason


def changes_between(self: Any, x: torch.Tensor) -> None:
    self.model(x).mean().backward()
    self.model.weight.grad.mul_(2)
    self.model(x).square().mean().backward()


def by_the_batch(self: Any, x: torch.Tensor) -> None:
    self.model(x).mean().backward()
    self.model.weight.grad.mul_(x.mean())


def by_hand(self: Any, x: torch.Tensor) -> None:
    (self.model.weight.grad,) = torch.autograd.grad(self.model(x).mean(), [self.model.weight])


def alternating(self: Any, x: torch.Tensor) -> Any:
    self.model(x).mean().backward()
    self.optimizer.step()
    self.optimizer.zero_grad()
    loss = self.model(x).square().mean()
    loss.backward()
    self.optimizer.step()
    return loss


def clears_between(self: Any, x: torch.Tensor) -> None:
    self.model(x).mean().backward()
    self.model.zero_grad()
    self.model(x).square().mean().backward()


def sets_before(self: Any, x: torch.Tensor) -> None:
    self.model.weight.grad = torch.ones_like(self.model.weight)
    self.model(x).mean().backward()


def twice_differentiated(self: Any, x: torch.Tensor) -> None:
    self.model(x).square().mean().backward(create_graph=True)
    self.model.weight.grad.square().sum().backward()


def noise_from_before(self: Any, x: torch.Tensor) -> None:
    noise = torch.randn(3, 6)
    self.model(x).mean().backward()
    self.model.weight.grad.add_(noise)


def shrinks_weights(self: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        self.model.weight.mul_(0.5)
    self.model(x).mean().backward()


def shrinks_data(self: Any, x: torch.Tensor) -> None:
    self.model.weight.data.mul_(0.5)
    self.model(x).mean().backward()


def gives_a_number(self: Any, x: torch.Tensor) -> Any:
    loss = self.model(x).mean()
    loss.backward()
    return loss.item()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("body", "manual", "told"),
    [
        (changes_between, False, "gradient of model.weight before its last backward"),
        (clears_between, False, "gradient of model.weight before its last backward"),
        (sets_before, False, "gradient of model.weight before its last backward"),
        (twice_differentiated, False, "create_graph"),
        (noise_from_before, False, "random numbers that were drawn before"),
        (by_the_batch, False, "single micro-batch"),
        (by_hand, False, "single micro-batch"),
        (alternating, True, "micro-batch|before its last backward"),
        (shrinks_weights, False, "changes before backward"),
        (shrinks_data, False, "changes before backward"),
        (gives_a_number, False, "Python number"),
    ],
)
def test_what_is_no_accumulation_is_refused_by_name(body: Any, manual: bool, told: str) -> None:
    step = Odd(body, manual)
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(mg.CaptureError, match=told) as caught:
        step(torch.randn(4, 6))
    assert caught.value.where.file == __file__
    assert caught.value.hint
    assert_same(before, step.model.state_dict())
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_a_hook_on_accumulated_gradients_is_refused() -> None:
    step = Scaled()
    step.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(mg.HookError, match="accumulated"):
        step({"x": torch.randn(8, 6)})


def test_a_manual_optimizer_that_steps_last() -> None:
    def body(self: Any, x: torch.Tensor) -> Any:
        loss = self.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return loss

    torch.manual_seed(0)
    step = Odd(body, manual=True)
    plain = copy.deepcopy(step.model.to(nn.Module))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(4, 6)
        optimizer.zero_grad()
        losses = []
        for micro in x.chunk(2):
            loss = plain(micro).square().mean()
            (loss / 2).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        assert_same(torch.stack(losses), step(x).detach())
        assert_same(plain.state_dict(), step.model.state_dict())


def test_arguments_that_are_changed_or_want_gradients() -> None:
    def body(self: Any, x: torch.Tensor) -> Any:
        loss = self.model(x * 2).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(0)
    step = Odd(body)
    plain = copy.deepcopy(step.model.to(nn.Module))
    x = torch.randn(4, 6, requires_grad=True)
    step(x)
    expected = []
    for micro in x.detach().chunk(2):
        leaf = micro.clone().requires_grad_()
        (plain(leaf * 2).square().mean() / 2).backward()
        expected.append(leaf.grad)
    assert_same(torch.cat(expected), x.grad)

    def changing(self: Any, x: torch.Tensor) -> Any:
        loss = self.model(x).square().mean()
        loss.backward()
        x.mul_(2)
        return loss, x

    step = Odd(changing)
    x = torch.randn(4, 6)
    doubled = x * 2
    _, returned = step(x)
    assert returned is x
    assert_same(doubled, x)


def test_a_gradient_of_a_replicated_argument_is_refused() -> None:
    def body(self: Any, x: torch.Tensor, scale: torch.Tensor) -> None:
        (self.model(x) * scale).square().mean().backward()

    scale = torch.ones(3, requires_grad=True)
    with pytest.raises(mg.CaptureError, match=r"argument batch\[1\].*replicated"):
        Odd(body)(torch.randn(4, 6), mg.replicated(scale))
    assert scale.grad is None
    Odd(body)(torch.randn(4, 6), mg.replicated(scale.detach()))


def test_a_parameter_is_not_split() -> None:
    def body(self: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        loss = F.linear(x, weight).square().mean()
        loss.backward()
        return loss

    step = Odd(body)
    weight = nn.Parameter(torch.randn(4, 6))
    step.model.weight = weight
    step = Odd(body, model=step.model.to(nn.Module))
    with pytest.raises(mg.AliasError, match="would be split"):
        step(torch.randn(4, 6), weight)
    assert step(torch.randn(4, 6), mg.replicated(weight)).shape == (2,)


# --- attributes that micro-batches find otherwise -----------------------------------------------------------


class Remembering(nn.Module):
    """`begin(self)` gives the attributes, `use(self, x)` is the forward before the layer."""

    def __init__(self, begin: Callable[[Any], None], use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(6, 3), use
        begin(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.use(self, x))


def from_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x if self.last is None else x + self.last
    self.last = x.detach()
    return x


def tuple_from_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x if self.last is None else x + self.last[0]
    self.last = (x.detach(), x.detach() * 2)
    return x


def only_at_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = 2 * x if self.last is None else x
    self.last = 1
    return x


def of_another_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + self.shift
    self.shift = x.detach()
    return x


def not_yet_there(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "added"):
        self.added = torch.zeros(6)
    self.added = self.added + x.detach().mean(0)
    return x + self.added


def start(self: Any) -> None:
    self.last, self.shift = None, torch.zeros(6)


@pytest.mark.parametrize(
    "use",
    [from_none, tuple_from_none, only_at_first, of_another_shape, not_yet_there],
    ids=lambda use: use.__name__,
)
def test_an_attribute_that_the_second_micro_batch_finds_otherwise_is_refused(use: Any) -> None:
    def body(self: Any, x: torch.Tensor) -> None:
        self.model(x).mean().backward()

    step = Odd(body, model=Remembering(start, use))
    with pytest.raises(mg.CaptureError, match=r"attribute model\.(last|shift|added).*second micro-batch"):
        step(torch.randn(4, 6))
    assert step.model.last is None
    step.eager(torch.randn(4, 6))  # the plain loop can do it


@pytest.mark.parametrize("steps", [1, 2])
def test_an_attribute_that_is_only_set_may_change_its_shape(steps: int) -> None:
    def keeping(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach() * 2
        return x

    def body(self: Any, x: torch.Tensor) -> None:
        self.model(x).mean().backward()

    step = Odd(body, model=Remembering(start, keeping))
    step.config.set_gradient_accumulation_steps(steps)
    for rows in (4, 6, 4):
        x = torch.randn(rows, 6)
        step(x)
        assert_same(x[-rows // steps :] * 2, step.model.last)


@pytest.mark.every_case
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_tensor_that_every_micro_batch_returns_is_returned_once(eager: bool) -> None:
    class Returning(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.table = nn.Linear(3, 2), torch.ones(3)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x: torch.Tensor) -> Any:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss, self.table

    step = Returning()
    _, table = (step.eager if eager else step)(torch.ones(4, 3))
    assert table is step.table
