"""Objects with tensors that a step puts into attributes: after each step there is what eager mode puts there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import monograph as mg

TABLE: dict[str, Any] = {}


class Stats:
    """Tensors and plain values, as a model keeps those of its last forward."""

    def __init__(self, mean: Any, count: int = 0) -> None:
        self.mean, self.count = mean, count


@dataclass
class Row:
    mean: float
    count: int


class Pair(NamedTuple):
    mean: Any
    count: Any


OLD = Stats(0.0)


class Model(nn.Module):
    """Puts something into `kept`."""

    def __init__(self, put: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.fc, self.kept, self.put = nn.Linear(3, 3), None, put
        self.rows: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.fc(x).square().mean()
        self.put(self, loss.detach())
        return loss


def a_new_one(self: Any, loss: torch.Tensor) -> None:
    self.kept = Stats(loss, 3)


def one_of_numbers(self: Any, loss: torch.Tensor) -> None:
    self.kept = Stats(loss.item(), 3)


def a_namespace(self: Any, loss: torch.Tensor) -> None:
    self.kept = SimpleNamespace(mean=loss)


def a_dataclass_of_numbers(self: Any, loss: torch.Tensor) -> None:
    self.kept = Row(loss.item(), 3)


def a_named_tuple_of_numbers(self: Any, loss: torch.Tensor) -> None:
    self.kept = Pair(loss.item(), 3)


def more_and_more(self: Any, loss: torch.Tensor) -> None:
    self.rows.append(Stats(loss))
    self.rows.append(Stats(loss.item() * 2))
    self.rows.append(Row(loss.item(), 2))
    self.rows.append(Pair(loss.item(), loss))


def in_one_another(self: Any, loss: torch.Tensor) -> None:
    self.kept = Stats({"parts": [loss, Stats(loss * 2)]})


def in_a_list(self: Any, loss: torch.Tensor) -> None:
    self.kept = [Stats(loss), Stats(loss * 2)]


def one_that_goes_on(self: Any, loss: torch.Tensor) -> None:
    before = Stats(torch.zeros(()), 0) if self.kept is None else self.kept
    self.kept = Stats(before.mean * 0.9 + loss, 1)


def one_of_before(self: Any, loss: torch.Tensor) -> None:
    OLD.mean = loss
    self.kept = OLD


def a_dict_of_before(self: Any, loss: torch.Tensor) -> None:
    TABLE["mean"] = loss
    self.kept = TABLE


PUTS = [
    a_new_one,
    one_of_numbers,
    a_namespace,
    a_dataclass_of_numbers,
    a_named_tuple_of_numbers,
    more_and_more,
    in_one_another,
    in_a_list,
    one_that_goes_on,
    one_of_before,
    a_dict_of_before,
]


def told(item: Any) -> Any:
    """The numbers in a value."""
    if isinstance(item, torch.Tensor):
        return item.tolist()
    if isinstance(item, dict):
        return {name: told(value) for name, value in item.items()}
    if isinstance(item, (list, Pair)):
        return [told(value) for value in item]
    return told(vars(item)) if isinstance(item, (Stats, Row, SimpleNamespace)) else item


@pytest.mark.parametrize("put", PUTS)
def test_each_step_puts_what_eager_puts(put):
    trails = []
    for eager in (True, False):
        TABLE.clear()
        OLD.mean = 0.0
        torch.manual_seed(0)
        model = Model(put)

        step = model if eager else mg.trace(model)
        trail: list[Any] = []
        for index in range(4):
            before = model.kept if put is not more_and_more else OLD
            step(torch.full((2, 3), float(index)))
            is_known = model.kept is OLD or model.kept is TABLE
            trail.append((told(model.kept), told(model.rows), is_known, model.kept is before))
        trails.append(trail)
    assert trails[0] == trails[1]


def test_what_cannot_be_made_anew_is_refused():
    def a_closure(self: Any, loss: torch.Tensor) -> None:
        self.kept = lambda: loss

    model = Model(a_closure)
    with pytest.raises(mg.CaptureError, match=r"an object that holds tensors of the step into module\.kept"):
        mg.trace(model)(torch.ones(2, 3))
    assert model.kept is None


def of_line(function: Callable[..., Any], number: int) -> int:
    """A line of a function, counted from its `def`."""
    return function.__code__.co_firstlineno + number


def test_the_error_is_at_the_line_that_does_it():
    def an_attribute(self: Any, loss: torch.Tensor) -> None:
        value = {"f": lambda: loss}
        self.kept = value

    def a_list(self: Any, loss: torch.Tensor) -> None:
        before = len(self.rows)
        self.rows.append(loss.item() * before)

    def a_global(self: Any, loss: torch.Tensor) -> None:
        known = len(TABLE)
        TABLE.setdefault("numbers", {})[known] = {loss.item()}

    TABLE.clear()
    for put in (an_attribute, a_list, a_global):
        with pytest.raises(mg.CaptureError) as caught:
            mg.trace(Model(put))(torch.ones(2, 3))
        assert caught.value.where.file == __file__
        assert caught.value.where.line == of_line(put, 2), put.__name__


class Trained(nn.Module):
    """Notes its losses, and in a dict outside also what it computes with."""

    def __init__(self, table: dict[str, Any], *, with_weight: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.losses, self.table, self.with_weight = nn.Linear(3, 3), [], table, with_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.fc(x).square().mean()
        self.losses.append(loss.detach())
        self.table["loss"] = loss.item()
        if self.with_weight:
            self.table["pair"] = (self.fc.weight, loss.detach())
        return loss


@pytest.mark.parametrize("with_weight", [False, True])
def test_state_that_is_replaced_beside_lists_and_dicts_that_are_filled(with_weight):
    """Parameters that are other objects now cost no build, unless the step leaves them there too."""
    trails = []
    for eager in (True, False):
        table: dict[str, Any] = {"loss": 0.0}
        model = Trained(table, with_weight=with_weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step: Any = (
            eager_step(model, optimizer) if eager else mg.train_graph(model, lambda y, _target: y, optimizer)
        )
        trail = []
        for index in range(6):
            if index % 2 == 1:  # as load_state_dict(assign=True) does it, and a checkpoint of the optimizer
                model.fc.weight.data = model.fc.weight.data * 0.5
                optimizer.load_state_dict(optimizer.state_dict())
            x = torch.full((2, 3), index + 1.0)
            loss = step(x) if eager else step(x, x)
            held = [table["pair"][0] is model.fc.weight, told(table["pair"][1])] if with_weight else []
            trail.append((told(loss), told(model.losses), table["loss"], held))
        trails.append(trail)
    assert trails[0] == trails[1]
    assert len(step.builds) == 1 or with_weight


@pytest.mark.parametrize("known", ["weight", "box", "text"])
def test_what_is_known_and_a_number_in_one_dict(known):
    """Each entry of a dict is written by itself: what puts one there does not put back another."""
    trails = []
    for eager in (True, False):
        table: dict[str, Any] = {"loss": 0.0, "known": None, "steps": 0}
        torch.manual_seed(0)
        fc = nn.Linear(3, 3)

        class Known(nn.Module):
            def __init__(self, fc: nn.Module, table: dict[str, Any]) -> None:
                super().__init__()
                self.fc, self.table = fc, table

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                loss: torch.Tensor = self.fc(x).square().mean()
                self.table["known"] = {"weight": self.fc.weight, "box": OLD, "text": "a step"}[known]
                self.table["loss"] = loss.item()
                self.table["steps"] += 1
                return loss

        model = Known(fc, table)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step: Any = (
            eager_step(model, optimizer) if eager else mg.train_graph(model, lambda y, _t: y, optimizer)
        )
        trail = []
        for index in range(4):
            x = torch.full((2, 3), index + 1.0)
            loss = step(x) if eager else step(x, x)
            is_known = table["known"] is fc.weight or table["known"] is OLD
            trail.append((told(loss), table["loss"], table["steps"], told(table["known"]), is_known))
            if index == 1:
                table["known"] = None
        trails.append(trail)
    assert trails[0] == trails[1]


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss

    return step
