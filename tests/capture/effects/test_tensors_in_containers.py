"""Tensors that a step puts into lists, deques and dicts: what they hold after each step is what eager mode puts there."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same

KEPT: list[torch.Tensor] = [torch.zeros(3)]
TABLE: dict[str, torch.Tensor] = {}


class Plain:
    """What build() runs on in plain PyTorch."""


class Shared:
    state = torch.zeros(3)


class Slotted:
    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = torch.zeros(3)


def by_position(self: Any, x: torch.Tensor) -> Any:
    before = self.states[0]
    self.states[0] = x.sum(0) if before is None else torch.tanh(before + x.sum(0))
    return self.states[0] * 2


def under_a_new_key(self: Any, x: torch.Tensor) -> Any:
    before = self.table.get("state")
    self.table["state"] = x.sum(0) if before is None else torch.tanh(before + x.sum(0))
    return self.table["state"] * 2


def in_a_window(self: Any, x: torch.Tensor) -> Any:
    self.window.append(x.sum(0))
    return torch.stack(list(self.window)).mean(0)


def in_a_list_of_three(self: Any, x: torch.Tensor) -> Any:
    self.items.append(x.sum(0))
    if len(self.items) > 3:
        self.items.pop(0)
    return torch.stack(self.items).mean(0)


def in_a_list_that_is_cleared(self: Any, x: torch.Tensor) -> Any:
    self.items.clear()
    self.items.append(x * 3)
    return self.items[0] + 1


def two_that_change_places(self: Any, x: torch.Tensor) -> Any:
    out = x + self.pair[0] - 2 * self.pair[1]
    self.pair[0], self.pair[1] = self.pair[1], self.pair[0] + 1
    return out


def in_a_global_list(self: Any, x: torch.Tensor) -> Any:
    KEPT[0] = torch.tanh(KEPT[0] + x.sum(0))
    return KEPT[0] * 2


def in_a_global_dict(self: Any, x: torch.Tensor) -> Any:
    TABLE["last"] = x * 2
    return x + 1


def in_an_attribute(self: Any, x: torch.Tensor) -> Any:
    self.state = torch.tanh(self.state + x.sum(0))
    return self.state * 2


def fresh() -> dict[str, Any]:
    KEPT[:] = [torch.zeros(3)]
    TABLE.clear()
    Shared.state = torch.zeros(3)
    return {
        "states": [None],
        "table": OrderedDict(),
        "window": deque(maxlen=3),
        "items": [],
        "pair": [torch.zeros(3), torch.ones(3)],
        "state": torch.zeros(3),
        "lists": defaultdict(list),
        "before": torch.zeros(2, 3),
        "slotted": Slotted(),
    }


def books(step: Any) -> Any:
    held = list(step.states), dict(step.table), list(step.window), list(step.items), list(step.pair)
    lists = {name: list(items) for name, items in step.lists.items()}
    return (*held, step.state, list(KEPT), dict(TABLE), lists, step.before, Shared.state, step.slotted.state)


def in_lists_of_a_default_dict(self: Any, x: torch.Tensor) -> Any:
    self.lists["a"].append(x * 2)
    return torch.stack(self.lists["a"]).sum(0)


def the_argument_itself(self: Any, x: torch.Tensor) -> Any:
    made = x + self.before
    self.before = x
    return made


def in_a_class(self: Any, x: torch.Tensor) -> Any:
    Shared.state = torch.tanh(Shared.state + x.sum(0)).detach()
    return Shared.state * 2


def in_a_slot(self: Any, x: torch.Tensor) -> Any:
    self.slotted.state = torch.tanh(self.slotted.state + x.sum(0)).detach()
    return self.slotted.state * 2


BUILDS = {  # of six steps: one for each number of entries
    by_position: 2,
    under_a_new_key: 2,
    in_a_window: 6,  # the step does not look at what falls out of it
    in_a_list_of_three: 4,
    in_a_list_that_is_cleared: 2,
    two_that_change_places: 1,
    in_a_global_list: 1,
    in_a_global_dict: 2,
    in_an_attribute: 1,
    in_lists_of_a_default_dict: 6,
    the_argument_itself: 1,
    in_a_class: 6,
    in_a_slot: 6,
}


def run(step: Any, call: Callable[..., Any]) -> list[Any]:
    for name, value in fresh().items():
        setattr(step, name, value)
    seen = []
    for index in range(6):
        returned = call(torch.full((2, 3), 0.1 * index))
        seen.append((returned, books(step)))
    return seen


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_containers_hold_what_eager_mode_puts_there(build: Callable[..., Any]) -> None:
    plain, graph = type("Plain", (Plain,), {"build": build})(), type("Step", (mg.Graph,), {"build": build})()
    expected = [torch.utils._pytree.tree_map(_copy, item) for item in run(plain, plain.build)]
    found = run(graph, graph)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_same(one[0], other[0]), index
    # no step has written into what the one before had left
    if build not in (in_a_global_list, in_a_global_dict, in_a_class):
        assert_same(expected[-1], found[-1])
    assert len(graph.builds) <= BUILDS[build], [item.reason for item in graph.builds]


def test_what_was_taken_from_a_container_stays_as_it_was() -> None:
    plain = type("Plain", (Plain,), {"build": in_a_list_of_three})()
    graph = type("Step", (mg.Graph,), {"build": in_a_list_of_three})()
    plain.items, graph.items = [], []
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in range(6):
        x = torch.full((2, 3), 0.1 * index)
        assert_same(plain.build(x), graph(x))
        taken.append((plain.items[-1], graph.items[-1]))
        for one, other in taken:
            assert_same(one, other)


def _copy(item: Any) -> Any:
    return item.clone() if isinstance(item, torch.Tensor) else item


def test_a_nested_value_that_is_left_has_each_tensor_in_its_place() -> None:
    def build(self: Any, x: torch.Tensor) -> Any:
        self.left = {"a": x + 1, "b": [x * 2, (x * 3,)]}
        return x * 1

    plain, step = Plain(), mg.trace(lambda x: build(step, x))
    for number in (1.0, 2.0):
        x = torch.full((2,), number)
        build(plain, x)
        step(x)
        assert_same(plain.left, step.left)


class Tables(nn.Module):
    """A table for each length, made when it is needed first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length)[:, None].float().sin()
        return self.linear(x) + self.tables[length]


@pytest.mark.parametrize("is_used", [True, False])
def test_a_number_anneals_beside_tables_by_length(is_used: bool) -> None:
    torch.manual_seed(0)
    model = Tables()
    theirs = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, theirs)]

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.temperature = model, 1.0
            self.add_optimizer(optimizers[0])

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            if is_used:
                loss = loss * self.temperature
            loss.backward()
            return loss

    step, temperature = Step(), 1.0
    for number in range(14):
        x = torch.randn(2, 5 + number % 3, 4)
        optimizers[1].zero_grad()
        expected = theirs(x).square().mean() * (temperature if is_used else 1)
        expected.backward()
        optimizers[1].step()
        assert torch.equal(step(x), expected)
        temperature *= 0.9
        step.temperature *= 0.9
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(step.builds) <= 6  # two for each length, while the tables come
