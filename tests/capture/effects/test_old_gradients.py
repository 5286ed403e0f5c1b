"""Gradients of the step before: what eager mode does with them, a graph does too, or says that it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same

Body = Callable[..., torch.Tensor]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)


class Written(mg.Graph):
    """A class whose build() is the body of a loop."""

    def __init__(self, model: Model, optimizer: Any, body: Body) -> None:
        super().__init__()
        self.model, self.body = model, body
        self.add_optimizer(optimizer, manual=True)
        self.optimizer = optimizer

    def build(self, *args: Any) -> torch.Tensor:
        return self.body(self.model, self.optimizer, *args)


def momentum(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def decay(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def of_head(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.one.parameters(), 0.1)


def frozen_later(model: Model, index: int) -> None:
    if index == 3:
        model.stem.requires_grad_(False)


def nothing(_model: Model, _index: int) -> None:
    pass


def in_turn(index: int) -> tuple[bool, ...]:
    return (index % 3 == 0,)


def none(_index: int) -> tuple[bool, ...]:
    return ()


def trail(
    make: Callable[..., Body],
    body: Body,
    optimizer_of: Callable[[Model], Any],
    edit: Callable[[Model, int], None] = nothing,
    more: Callable[[int], tuple[bool, ...]] = none,
) -> Any:
    """The results of six steps, and the state after each."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    step = make(model, optimizer, body)
    found = []
    for index in range(6):
        edit(model, index)
        result = step(X, *more(index)).detach().clone()
        state = optimizer.state_dict()["state"]
        found.append((result, [item.detach().clone() for item in model.parameters()], repr(state)))
    return found


def plainly(model: Model, optimizer: Any, body: Body) -> Body:
    return lambda *args: body(model, optimizer, *args)


def traced(model: Model, optimizer: Any, body: Body) -> Body:
    return mg.trace(plainly(model, optimizer, body))


def eagerly_first(model: Model, optimizer: Any, body: Body) -> Body:
    """Two calls of `eager()`, then those of the graph."""
    step: Any = traced(model, optimizer, body)
    ways = iter([step.eager, step.eager])
    return lambda *args: next(ways, step)(*args)


def kept(model: Model, optimizer: Any, body: Body) -> Body:
    step = Written(model, optimizer, body)
    step.config.keep_gradients()
    return step


def loss_of(model: Model, x: torch.Tensor, *, one: bool = True) -> torch.Tensor:
    head = model.one if one else model.other
    loss: torch.Tensor = head(model.stem(x)).square().mean()
    return loss


def zeros_first(model: Model, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss


def zeros_last(model: Model, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def heads(model: Model, optimizer: Any, x: torch.Tensor, one: bool) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = loss_of(model, x, one=one)
    loss.backward()
    optimizer.step()
    return loss


def adds_up(model: Model, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    return loss


def clips_all(model: Model, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    norm: torch.Tensor = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm


def clips_cleared(model: Model, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    return clips_all(model, optimizer, x)


def cleared_by_hand(model: Model, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    return adds_up(model, optimizer, x)


ROWS: dict[str, tuple[Any, ...]] = {
    "zeros first": (zeros_first, momentum, frozen_later),
    "zeros last": (zeros_last, momentum, frozen_later),
    "heads": (heads, decay, nothing, in_turn),
    "adds up": (adds_up, momentum, frozen_later),
    "clips all": (clips_all, of_head),
    "clips cleared": (clips_cleared, of_head),
    "cleared by hand": (cleared_by_hand, momentum, frozen_later),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_traced_function_is_what_eager_mode_runs(row: str) -> None:
    assert_same(trail(plainly, *ROWS[row]), trail(traced, *ROWS[row]))


@pytest.mark.parametrize("row", ["adds up", "heads"])
def test_a_traced_function_goes_on_after_eager_steps(row: str) -> None:
    assert_same(trail(plainly, *ROWS[row]), trail(eagerly_first, *ROWS[row]))


@pytest.mark.parametrize("row", ROWS)
def test_a_class_that_keeps_gradients_is_what_eager_mode_runs(row: str) -> None:
    assert_same(trail(plainly, *ROWS[row]), trail(kept, *ROWS[row]))


class Automatic(mg.Graph):
    """A step whose optimizer the graph steps."""

    def __init__(self, make: Callable[[Model], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()
        self.add_optimizer(make(self.model))


def test_an_automatic_optimizer_has_no_zeros() -> None:
    class Step(Automatic):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            self.model.zero_grad(set_to_none=False)
            loss = loss_of(self.model, x)
            loss.backward()
            return loss

    step = Step(momentum)
    step(X)
    step.model.stem.requires_grad_(False)
    with pytest.raises(mg.OptimizerError, match=r"zero_grad\(set_to_none=False\)") as caught:
        step(X)
    assert "manual=True" in caught.value.hint


@pytest.mark.parametrize(
    ("row", "message", "line"),
    [
        ("zeros first", r"zero_grad\(set_to_none=False\), and a gradient of model.stem.bias in some", zeros_first),
        ("zeros last", r"zero_grad\(set_to_none=False\), and a gradient of model.stem.bias in some", zeros_last),
        ("heads", r"zero_grad\(set_to_none=False\), and a gradient of model.one.bias in some", heads),
        ("clips all", r"build\(\) reads the gradient of model.stem.weight, which nothing clears", clips_all),
    ],
)  # fmt: skip
def test_a_class_that_would_compute_something_else_is_refused(row: str, message: str, line: Body) -> None:
    with pytest.raises(mg.OptimizerError, match=message) as caught:
        trail(Written, *ROWS[row])
    assert "config.keep_gradients() before the first call" in caught.value.hint
    first = line.__code__.co_firstlineno
    assert caught.value.where.file == __file__
    assert first < caught.value.where.line <= first + 6


def test_a_class_that_clears_what_it_clips_is_what_eager_mode_runs() -> None:
    assert_same(trail(plainly, *ROWS["clips cleared"]), trail(Written, *ROWS["clips cleared"]))


def test_zeros_that_backward_adds_to_are_as_none() -> None:
    row = zeros_first, momentum
    assert_same(trail(plainly, *row), trail(Written, *row))


def test_layers_that_stay_frozen_have_no_zeros() -> None:
    def frozen(model: Model, _index: int) -> None:
        model.stem.requires_grad_(False)

    row = zeros_first, momentum, frozen
    assert_same(trail(plainly, *row), trail(Written, *row))


def test_a_traced_function_that_is_cleared_outside_has_one_build() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = momentum(model)
    step: Any = traced(model, optimizer, adds_up)
    for _ in range(3):
        optimizer.zero_grad()
        step(X)
    assert len(step.builds) == 1


def test_gradients_of_calls_that_were_made_cannot_be_kept_afterwards() -> None:
    def body(model: Model, optimizer: Any, x: torch.Tensor, clears: bool) -> torch.Tensor:
        if clears:
            optimizer.zero_grad()
        return adds_up(model, optimizer, x)

    torch.manual_seed(0)
    model = Model()
    step = traced(model, momentum(model), body)
    step(X, True)
    with pytest.raises(mg.OptimizerError, match=r"build\(\) updates by the gradient of model.stem.weight"):
        step(X, False)


def test_automatic_optimizers_clear_their_own_alone() -> None:
    class Step(Automatic):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss_of(self.model, x).backward()
            norm: torch.Tensor = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            return norm

    with pytest.raises(mg.OptimizerError, match=r"model.stem.weight, which nothing clears"):
        Step(of_head)(X)


# --- gradients that eager code has made ---------------------------------------------------------------------------


def norm_of(model: nn.Module) -> torch.Tensor:
    return sum((p.grad.norm() for p in model.parameters() if p.grad is not None), torch.zeros(()))


@torch.no_grad()
def clipped(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def eager_steps(function: Callable[[nn.Module], torch.Tensor], *, as_graph: bool) -> Any:
    torch.manual_seed(0)
    model, made = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run() -> torch.Tensor:
        return function(model)

    step = mg.trace(run) if as_graph else run
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, X).backward()
        made.append(step())
        optimizer.step()
    return made, [*model.parameters()]


@pytest.mark.every_case
@pytest.mark.parametrize("function", [norm_of, clipped])
def test_a_traced_function_finds_the_gradients_of_eager_code(function: Any) -> None:
    assert_same(eager_steps(function, as_graph=False), eager_steps(function, as_graph=True))


class Norm(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self) -> torch.Tensor:
        return norm_of(self.model)


def test_a_class_that_would_not_find_the_gradients_of_eager_code_is_refused() -> None:
    model = Model()
    step, keeping = Norm(model), Norm(model)
    keeping.config.keep_gradients()
    assert step() == 0
    assert keeping() == 0
    loss_of(model, X).backward()
    for _ in range(2):
        with pytest.raises(mg.OptimizerError, match="which is there before the step") as caught:
            step()
    assert "model.stem.weight" in str(caught.value)
    assert "keep_gradients" in caught.value.hint
    assert_same(norm_of(model), keeping())
    model.zero_grad()
    assert step() == 0
    assert len(step.builds) == 1


def test_a_parameter_that_takes_the_place_of_another_is_looked_at() -> None:
    model = Model()
    step = Norm(model)
    assert step() == 0
    model.stem.weight = nn.Parameter(torch.ones(4, 4))
    assert step() == 0
    assert len(step.builds) == 1
    model.stem.weight.grad = torch.ones(4, 4)
    with pytest.raises(mg.OptimizerError, match=r"the gradient of model\.stem\.weight"):
        step()


def test_parameters_without_a_gradient_are_no_reason_for_anything() -> None:
    """Clipping looks at all parameters, also at those that are frozen."""

    def train(step: Any) -> Any:
        return [step(X) for _ in range(3)]

    def made(*, as_graph: bool) -> Any:
        torch.manual_seed(0)
        model = Model()
        model.stem.requires_grad_(False)
        optimizer = torch.optim.SGD(model.one.parameters(), 0.1)

        def body(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            nn.utils.clip_grad_norm_([*model.stem.parameters(), *model.one.parameters()], 0.1)
            optimizer.step()
            return loss

        step = mg.trace(body) if as_graph else body
        return train(step), len(step.builds) if as_graph else 1

    assert_same(made(as_graph=False), made(as_graph=True))
