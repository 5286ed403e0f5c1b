"""Attributes that forward sets, on modules and on objects outside of the graph: what eager mode leaves there."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.internals.internals import internals_of
from tests.capture.traps import (
    Holder,
    Plain,
    compare,
    fakes_in,
    forward,
    graph,
    inputs,
    linear,
    sgd,
    train,
)
from tests.support import assert_same

# --- Python attributes that forward sets --------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.fc(x) * self.n


class ClassCounter(nn.Module):
    n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = self.n + 1
        return x * self.n


def count_on_graph(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.n += 1
    return x * self.n


def count_on_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.meter.n += 1
    return x * self.meter.n


def meter() -> Holder:
    holder = Holder()
    holder.n = 0
    return holder


class CountingOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.n = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.n += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / self.n)


def counting(where: str) -> mg.Graph:
    if where == "module":
        return graph(forward, model=Counter())
    if where == "class":
        return graph(forward, model=ClassCounter())
    if where == "graph":
        return graph(count_on_graph, n=0)
    if where == "optimizer":
        model = linear()
        step = graph(train, model=model)
        step.add_optimizer(CountingOptimizer(model.parameters()))
        return step
    return graph(count_on_object, meter=meter())


@pytest.mark.every_case
@pytest.mark.parametrize("where", ["module", "class", "graph", "object", "optimizer"])
def test_a_python_counter_counts_as_in_eager_mode(where):
    eager, step = counting(where), counting(where)
    x = torch.ones(2, 4)
    for count in range(1, 4):
        assert_same(eager.eager(x), step(x))
        owners = [
            (getattr(side, "model", side), side, getattr(side, "meter", side)) for side in (eager, step)
        ]
        for first, second in zip(*owners, strict=True):
            assert getattr(first, "n", count) == getattr(second, "n", count) == count
        if where == "optimizer":
            assert [
                held.optimizer.n for side in (eager, step) for held in internals_of(side).registry.optimizers
            ] == [count, count]


class Stashing(nn.Module):
    """Leaves things behind in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.history: list[Any] = []
        self.table: dict[str, Any] = {}
        self.recent: deque[Any] = deque(maxlen=2)
        self.seen = set()
        self.last = None
        self.shape: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        self.history.append(hidden)
        self.table["hidden"] = hidden
        self.recent.append(hidden)
        self.seen.add("hidden")
        self.last = hidden.detach()
        self.fresh = hidden.detach() * 2
        self.shape = hidden.shape
        return hidden.relu()


def test_stashed_tensors_are_current_after_every_step():
    compare(
        train,
        Stashing,
        look=lambda model: [model.last, model.fresh, list(model.shape), model.seen, *stashed(model)],
        builds=3,  # the second step finds what the first has put into the set, the third a longer deque
    )


def stashed(model):
    """What is in the containers, without its history."""
    return [item.detach() for item in (*model.history, *model.table.values(), *model.recent)]


def test_containers_hold_what_eager_mode_puts_there():
    model = Stashing()
    step = graph(train, model=model)
    step.add_optimizer(sgd(model))
    x = torch.ones(2, 4)
    with torch.no_grad():
        hidden = model.fc(x)
    step(x)
    assert_same([hidden] * 3, stashed(model))
    assert model.history[0].requires_grad
    assert model.seen == {"hidden"}
    assert not fakes_in(step, model)


def test_nested_tensors_set_as_an_attribute_are_current():
    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.maps = [x * 2, {"deep": (x * 3, 7)}]
            return x * 1

    def look(model: Any) -> Any:
        return [model.maps[0], *model.maps[1]["deep"]]

    compare(forward, Attending, calls=lambda: inputs(3, 2), optimizer=None, look=look)


def test_an_object_set_as_an_attribute_is_made_in_each_step():
    class Noting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.note = Holder()
            self.note.value = x * 2
            return x * 1

    model = Noting()
    step = graph(forward, model=model)
    for value in (1.0, 2.0, 3.0):
        before = getattr(model, "note", None)
        step(torch.full((2,), value))
        assert_same(model.note.value, torch.full((2,), 2 * value))
        assert model.note is not before


def test_tensors_stashed_in_plain_objects():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        self.box.last = out.detach()
        self.box.inner.last = out.detach() * 2
        return out.sum()

    def box() -> Holder:
        holder = Holder()
        holder.inner = Holder()
        return holder

    trails = []
    for kind in (Plain, graph):
        step: Any = Plain(build, None) if kind is Plain else graph(build)
        step.model, step.box = linear(), box()
        trail = []
        for x in inputs(3, 2, 4):
            step(x)
            trail.append([step.box.last.clone(), step.box.inner.last.clone()])
        trails.append(trail)
    assert_same(*trails)
    assert not fakes_in(step)


def test_tensors_stashed_in_a_module_that_the_graph_does_not_hold():
    net = Stashing()

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return net(x).sum()

    step = graph(build)
    expected = []
    for x in inputs(3, 2, 4):
        with torch.no_grad():
            step(x)
        expected.append(net.fc(x).detach())
        assert_same(expected[-1], net.last)
    assert not fakes_in(step, net)
    assert_same(expected, net.history)  # a list that only grows does, as in eager mode


def test_a_value_computed_when_it_is_first_missing():
    class Cached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "average"):
                self.average = x.mean()
            else:
                self.average = self.average * 0.9 + x.mean() * 0.1
            return x - self.average

    compare(
        forward,
        Cached,
        calls=lambda: inputs(4, 3),
        optimizer=None,
        builds=2,
        look=lambda model: [model.average],
    )


def test_buffers_assigned_anew():
    class Assigning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("c", torch.zeros(2))
            self.register_buffer("view_of_argument", torch.zeros(2))
            self.register_buffer("same_twice", torch.zeros(2))
            self.register_buffer("swapped", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.c = self.c + x
            self.view_of_argument = x.view(2)
            self.same_twice, self.swapped = self.swapped, self.same_twice + 1
            return self.c * 2

    compare(forward, Assigning, calls=lambda: inputs(4, 2), optimizer=None)


def test_one_tensor_as_two_buffers_one_of_which_is_assigned_anew():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(2))
            self.register_buffer("latest", self.first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.latest = self.latest + x
            return self.latest + self.first * 2

    compare(forward, Tied, calls=lambda: inputs(4, 2), optimizer=None, builds=2)


def test_batch_norm_counts_its_batches():
    compare(train, lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)))


# --- objects outside of the graph ---------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.seen: list[torch.Tensor] = []


class Loss:
    """A callable with a memory."""

    def __call__(self, x):
        loss = x.square().mean()
        self.last = loss.detach()
        return loss


METER, HISTORY, LOSS = Meter(), [1], Loss()


def watched_loss(model, x):
    loss = LOSS(model(x))
    METER.total = METER.total + loss.detach()
    METER.seen.append(loss.detach())
    return loss


class Watched(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x):
        loss = watched_loss(self.model, x)
        loss.backward()
        HISTORY.append(loss)
        return loss


def test_globals_hold_what_eager_mode_leaves_there():
    step = Watched()
    loss = step(torch.randn(2, 3))
    assert_same(loss.detach(), METER.total)
    assert_same([loss.detach()], METER.seen)
    assert HISTORY[0] == 1
    assert_same(loss.detach(), HISTORY[1].detach())
    assert_same(loss.detach(), LOSS.last)
    assert not fakes_in(step, METER, HISTORY, LOSS)


def test_a_closure_variable_without_a_value_is_no_hindrance():
    def make():
        class Early(mg.Graph):
            def build(self, x):
                return later if x is None else x * 2

        doubled = Early()(torch.ones(2))
        later = None
        return doubled, later

    assert make()[0].tolist() == [2.0, 2.0]


def test_a_scaler_that_the_graph_does_not_know_is_refused():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    class Scaled(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 3)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x):
            loss = self.model(x).square().mean()
            scaler.scale(loss).backward()
            return loss

    with pytest.raises(mg.CaptureError, match="does not know") as caught:
        Scaled()(torch.randn(2, 3))
    assert "set_grad_scaler" in caught.value.hint
    assert caught.value.where.file == __file__
    assert scaler.get_scale() == 4.0
    assert isinstance(scaler.scale(torch.ones(())), torch.Tensor)
