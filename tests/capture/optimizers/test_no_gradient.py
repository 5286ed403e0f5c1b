"""Parameters without a gradient: no state is made for them, no build is lost, and all numbers are eager's."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

import monograph as mg
from tests.support import assert_same

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": AdamW,
    "Adam fused": lambda p: Adam(p, fused=True, amsgrad=True),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "SGD": lambda p: SGD(p, lr=0.1),
    "Adagrad": Adagrad,
    "RMSprop": RMSprop,
    "NAdam foreach": lambda p: NAdam(p, foreach=True),
    "Adadelta": Adadelta,
}


class Model(nn.Module):
    """A head that is used or not, and an embedding that is detached with it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.embedding = nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        rows = self.embedding(torch.arange(len(x)) % 3)
        y = self.body(x) + (rows if used else rows.detach())
        return self.head(y) if used else y


class Step(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        loss = self.model(x, used).square().mean()
        loss.backward()
        return loss


Calls = Sequence[tuple[int, bool]]  # how many rows, and whether the head is used


def batch(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))


def side(make: Callable[[Any], Optimizer]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, make(model.parameters())


def state_of(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def plainly(make: Callable[[Any], Optimizer], calls: Calls) -> list[Any]:
    (model, optimizer), trail = side(make), []
    for step, (rows, used) in enumerate(calls):
        optimizer.zero_grad()
        model(batch(step, rows), used).square().mean().backward()
        optimizer.step()
        trail.append(state_of(model, optimizer))
    return trail


def check(make: Callable[[Any], Optimizer], calls: Calls, builds: int, backend: str = "aten") -> Step:
    (model, optimizer), trail = side(make), []
    graph = Step(model, optimizer)
    graph.config.backend(backend)
    for step, (rows, used) in enumerate(calls):
        graph(batch(step, rows), used)
        trail.append(state_of(model, optimizer))
    reasons = [build.reason for build in graph.builds]
    assert len(reasons) == builds, reasons
    if backend == "aten":
        assert_same(plainly(make, calls), trail)
    return graph


ALTERNATING = [(2 + step % 2, False) for step in range(7)]
IN_ONE_SHAPE = [(2 + step % 2, step % 2 == 1) for step in range(7)]
FROM_THREE_ON = [(2, step >= 3) for step in range(7)]
USED_FIRST = [(2 + step % 2, step % 2 == 0) for step in range(7)]


@pytest.mark.one_case
@pytest.mark.parametrize("calls", [ALTERNATING, IN_ONE_SHAPE, FROM_THREE_ON, USED_FIRST])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_builds_serve_two_forms(make: Callable[[Any], Optimizer], calls: Calls) -> None:
    second = check(make, calls, builds=2).builds[1]
    assert second.reason.startswith("argument ")


@pytest.mark.long
def test_compiled_builds_stay_too() -> None:
    check(AdamW, ALTERNATING[:4], builds=2, backend="inductor")


def test_state_that_nobody_asks_for_is_no_input() -> None:
    graph = check(AdamW, [(2, False)], builds=1)
    assert "head.weight/exp_avg" not in str(graph.builds[0].program)
    assert "body.weight/exp_avg" in str(graph.builds[0].program)


# --- optimizers that look at more than the state of what they update ---------------------------------------------------


class Eager(Optimizer):
    """Makes state for each parameter, with a gradient or without."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    state["sum"].add_(parameter.grad)
                    parameter.sub_(state["sum"], alpha=group["lr"])


class Counting(Eager):
    """The more parameters have state, the smaller are its steps."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                    parameter.sub_(state["sum"], alpha=group["lr"])
        for parameter, state in self.state.items():
            parameter.sub_(state["sum"], alpha=0.1 / len(self.state))


class Picking(Eager):
    """Leaves vectors alone, with a gradient or without."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2 and parameter.grad is not None:
                    state = self.state[parameter]
                    if "sum" not in state:
                        state["sum"] = torch.zeros_like(parameter)
                    state["sum"].add_(parameter.grad)
                    parameter.sub_(state["sum"], alpha=group["lr"])


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "builds"), [(Eager, 3), (Counting, 3), (Picking, 2)])
@pytest.mark.parametrize("calls", [ALTERNATING, IN_ONE_SHAPE], ids=["alternating", "in one shape"])
def test_optimizers_of_your_own(kind: type[Optimizer], builds: int, calls: Calls) -> None:
    if calls is ALTERNATING:
        builds = 2  # the second one is for any number of rows
    check(kind, calls, builds)


@pytest.mark.every_case
@pytest.mark.parametrize("make", [RAdam, ASGD])
def test_updates_of_lists_that_branch_on_a_counter(make: Any) -> None:
    """The list of counters is moved on by a tensor that holds 1."""
    trails = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = make(model.parameters(), foreach=True)
        step = mg.train_graph(model, nn.MSELoss(), optimizer) if captured else None
        for number in range(7):
            x, y = batch(number, 3), batch(-number - 1, 3)
            if step is not None:
                step(x, y)
            else:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        trails.append((model.state_dict(), optimizer.state_dict()["state"]))
    assert_same(*trails)


def test_a_step_in_build_of_an_optimizer_that_the_graph_steps_is_refused():
    """It would update twice in each call, and eager mode, which runs the same build(), would agree."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Twice(mg.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x):
            loss = self.model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

    before = model.weight.detach().clone()
    with pytest.raises(mg.OptimizerError, match="each call would update twice") as caught:
        Twice()(torch.ones(4, 2))
    assert "manual=True" in caught.value.hint
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "freeze",
    [
        lambda model: model.body.requires_grad_(False),
        lambda model: model.body.weight.requires_grad_(False),
        lambda model: setattr(model.body.weight, "requires_grad", False),
    ],
)
def test_a_step_that_freezes_for_good_is_told_where(freeze: Callable[[Model], Any]) -> None:
    class Freezing(Step):
        def build(self, x: torch.Tensor, used: bool) -> torch.Tensor:
            freeze(self.model)
            return super().build(x, used)

    model = Model()
    step = Freezing(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.CaptureError, match=r"requires_grad of model\.body\.weight at False") as caught:
        step(torch.ones(2, 4), True)
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert "lambda" in linecache.getline(__file__, caught.value.where.line)
    assert model.body.weight.requires_grad
