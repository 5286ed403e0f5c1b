"""Plain objects of tensors as arguments, and tensors as attributes of a Graph: the values of eager mode."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same
from tests.support.choice import only_quick

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Batch:
    """As loaders of graph networks make them."""

    scale = 2.0

    def __init__(self, x: torch.Tensor, factor: float = 1.0) -> None:
        self.x, self.factor = x, factor
        self.parts = {"squares": x * x, "pair": (x + 1, None)}

    @property
    def size(self) -> int:
        return len(self.x)

    def total(self) -> torch.Tensor:
        return (self.x * self.parts["squares"] + self.parts["pair"][0]).sum() * self.scale


@dataclass
class Record:
    x: torch.Tensor

    def total(self) -> torch.Tensor:
        return self.x.sum()


class Totals(mg.Graph):
    def build(self, batch: Any) -> torch.Tensor:
        return batch.total() * batch.size * batch.factor


def plain(batch: Batch) -> torch.Tensor:
    return batch.total() * batch.size * batch.factor


def test_a_batch_object_is_an_argument() -> None:
    graph = Totals()
    for k in range(3):
        batch = Batch(X * k)
        assert_same(plain(batch), graph(batch))
    assert len(graph.builds) == 1
    assert_same(plain(batch), graph.eager(batch))
    assert graph.verify(batch).ok


def test_what_is_in_it_is_looked_at() -> None:
    graph, batch = Totals(), Batch(X)
    graph(batch)
    batch.factor = 3.0
    assert_same(plain(batch), graph(batch))
    batch.parts["more"] = X
    assert_same(plain(batch), graph(batch))
    longer = Batch(torch.cat([X, X]))
    assert_same(plain(longer), graph(longer))


@pytest.mark.parametrize("kind", [Batch, Record])
def test_its_class_is_looked_at(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, batch = mg.trace(lambda batch: batch.total()), kind(X)
    assert_same(batch.total(), graph(batch))
    monkeypatch.setattr(kind, "total", lambda self: self.x.prod())
    assert_same(batch.total(), graph(batch))
    if kind is Batch:
        monkeypatch.undo()
        monkeypatch.setattr(kind, "scale", 5.0)
        assert_same(batch.total(), graph(batch))


def test_namespaces_in_namespaces() -> None:
    graph = mg.trace(lambda given: given.x + given.inner.y)
    for k in range(2):
        given = SimpleNamespace(x=X * k, inner=SimpleNamespace(y=X + k))
        assert_same(given.x + given.inner.y, graph(given))
    assert len(graph.builds) == 1


def change(batch: Any) -> torch.Tensor:
    batch.x = batch.x + 1
    batch.made = batch.x * 2
    return batch.made


def remove(batch: Any) -> torch.Tensor:
    shift = batch.shift
    del batch.shift
    return batch.x + shift


def go_on(state: Any) -> torch.Tensor:
    state.x = (state.x + X).relu()
    state.factor += 1.0
    state.parts["pair"] = (state.x * 2, state.factor)
    return state.x * state.factor


CHANGES: dict[str, tuple[Any, Any, int]] = {
    "an attribute that is made": (change, lambda: SimpleNamespace(x=X), 1),
    "an attribute that is taken away": (remove, lambda: SimpleNamespace(shift=X, x=X), 1),
    "state in an object": (go_on, lambda: Batch(X), 3),
    "state in a record": (change, lambda: Record(X), 3),
}


@pytest.mark.every_case
@pytest.mark.parametrize("backend", only_quick(["aten", "inductor"], "aten"))
@pytest.mark.parametrize("name", CHANGES)
def test_changes_to_it_reach_the_caller(name: str, backend: Any) -> None:
    function, make, calls = CHANGES[name]
    graph, expected, given = mg.trace(function), make(), make()
    graph.config.backend(backend)
    for _ in range(calls):
        assert_same(function(expected), graph(given))
        assert list(vars(expected)) == list(vars(given))
        assert_same(vars(expected), vars(given))


def test_an_attribute_that_stays_is_the_very_same() -> None:
    given = SimpleNamespace(shift=X * 2, x=X)
    mg.trace(remove)(given)
    assert given.x is X


def test_objects_that_hold_more_than_values_are_refused() -> None:
    batch = Batch(X)
    batch.me = batch
    for given in (batch, SimpleNamespace(n=1), iter([X]), SimpleNamespace(x=X, model=nn.Linear(2, 2))):
        with pytest.raises(mg.SignatureError, match="a graph cannot take"):
            mg.trace(lambda given: X)(given)


# --- tensors as attributes of a Graph ------------------------------------------------------------------------------------


class Adjacent(mg.Graph):
    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.adjacency = adjacency

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.adjacency @ x


def test_a_tensor_is_an_attribute() -> None:
    table = torch.linspace(0.0, 1.0, 4).reshape(2, 2)
    graph = Adjacent(table.clone())
    assert_same(table @ X, graph(X))
    graph.adjacency.mul_(2.0)
    assert_same((table * 2.0) @ X, graph(X))
    assert len(graph.builds) == 1
    graph.adjacency = table + 1
    assert_same((table + 1) @ X, graph(X))
    graph.adjacency = table[:1]
    assert_same(table[:1] @ X, graph(X))


class Running(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.hidden = torch.zeros(3), torch.zeros(3)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return running(self, x)


def running(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.mean.mul_(0.9).add_(x.sum(0))
    self.hidden = (self.hidden + x.sum(0)).tanh()
    return self.mean * self.hidden


def test_a_step_changes_its_tensors() -> None:
    graph, side = Running(), SimpleNamespace(mean=torch.zeros(3), hidden=torch.zeros(3))
    for k in range(4):
        assert_same(running(side, X * k), graph(X * k))
        assert_same((side.mean, side.hidden), (graph.mean, graph.hidden))
    other = Running()
    other.load_state_dict(copy.deepcopy(graph.state_dict()))
    assert_same(graph(X), other(X))


class Cell:
    def __init__(self) -> None:
        self.hidden = torch.zeros(3)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = (self.hidden + x.sum(0)).tanh()
        return self.hidden * 1


def test_a_plain_object_keeps_its_tensors() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell.step(x)

    graph, cell = Step(), Cell()
    for k in range(4):
        assert_same(cell.step(X * k), graph(X * k))
        assert_same(cell.hidden, graph.cell.hidden)


def test_a_tensor_that_trains_is_no_attribute() -> None:
    for value in (nn.Parameter(X), X.clone().requires_grad_()):
        with pytest.raises(mg.DefinitionError, match="requires grad"):
            Adjacent(value)


# --- what mg.trace finds by name -----------------------------------------------------------------------------------------


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


MODEL, OPTIMIZER = trained()


def update(loss: torch.Tensor) -> None:
    OPTIMIZER.zero_grad()
    loss.backward()
    OPTIMIZER.step()


def with_a_helper(x: torch.Tensor) -> torch.Tensor:
    loss = MODEL(x).square().sum()
    update(loss)
    return loss


class Trainer:
    def __init__(self) -> None:
        self.model, self.optimizer = trained()
        self.other_model, self.other_optimizer = trained()

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().sum()
        self.update(loss)
        return loss


def with_a_local_function(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        def finish(loss: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        loss = model(x).square().sum()
        finish(loss)
        return loss

    return step


FUNCTIONS: dict[str, Any] = {
    "a helper": lambda: with_a_helper,
    "a method": lambda: Trainer().step,
    "a partial method": lambda: partial(Trainer().step),
    "an object": lambda: (lambda trainer: lambda x: trainer.step(x))(Trainer()),
    "a local function": lambda: with_a_local_function(*trained()),
}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_an_optimizer_is_found_behind_helpers(make: Any) -> None:
    model, optimizer = trained()
    plain, graph = with_a_local_function(model, optimizer), mg.trace(make())
    for _ in range(3):
        assert_same(plain(X), graph(X))
    assert len(graph.builds) == 1
