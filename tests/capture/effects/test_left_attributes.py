"""What build() leaves in attributes and containers of what the graph holds, and what somebody changes there meanwhile."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
Build = Callable[[Any, torch.Tensor], Any]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.0)
        self.tag: Any = "a"
        self.queue: deque[int] = deque(maxlen=3)
        self.seen: set[int] = set()
        self.items: list[int] = []
        self.table: dict[int, int] = {}
        self.count = 0
        self.number: Any = np.int64(0)
        self.holder: Any = SimpleNamespace(n=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def sides(build: Build) -> tuple[Any, Any]:
    plain, graph = type("Plain", (), {"build": build})(), type("Step", (mg.Graph,), {"build": build})()
    plain.m, graph.m = Module(), Module()
    return plain, graph


def state_of(module: Module) -> Any:
    attributes = {k: v for k, v in vars(module).items() if k[:1] != "_"}
    return attributes, [item.training for item in module.modules()]


def compared(build: Build, change: Callable[[Any, int], object], num_steps: int) -> int:
    """The number of builds, when each step has given what it gives in eager mode."""
    plain, graph = sides(build)
    for step in range(num_steps):
        change(plain.m, step)
        change(graph.m, step)
        assert torch.equal(plain.build(X), graph(X)), step
        assert repr(state_of(plain.m)) == repr(state_of(graph.m)), step
    return len(graph.builds)


# --- modes --------------------------------------------------------------------------------------------------------------


def asked_and_set(self: Any, x: torch.Tensor) -> Any:
    y = x * (2.0 if self.m.training else 3.0)
    self.m.eval()
    return y


def set_and_put_back(self: Any, x: torch.Tensor) -> Any:
    before = self.m.training
    self.m.eval()
    y = self.m(x) * (2.0 if before else 3.0)
    self.m.train(before)
    return y


def of_a_part(self: Any, x: torch.Tensor) -> Any:
    modes = [item.training for item in self.m.modules()]
    self.m.train()
    return self.m(x) * sum(modes)


def other_mode(module: Module, step: int) -> None:
    if step in (3, 6):
        module.train(step == 6)
    if step == 8:
        module.inner.eval()


@pytest.mark.parametrize("build", [asked_and_set, set_and_put_back, of_a_part], ids=lambda b: b.__name__)
def test_a_mode_that_is_asked_for_and_set(build: Build) -> None:
    assert compared(build, other_mode, 10) <= 3


# --- attributes that are only set ---------------------------------------------------------------------------------------


def text(self: Any, x: torch.Tensor) -> Any:
    self.m.tag = "in"
    return x * 2


def nothing(self: Any, x: torch.Tensor) -> Any:
    self.m.tag = None
    return x * 2


def an_array(self: Any, x: torch.Tensor) -> Any:
    self.m.tag = np.int64(3)
    return x * 2


def the_mode(self: Any, x: torch.Tensor) -> Any:
    self.m.eval()
    return self.m(x)


def the_mode_twice(self: Any, x: torch.Tensor) -> Any:
    self.m.eval()
    y = self.m(x)
    self.m.train()
    return y


def set_otherwise(module: Module, step: int) -> None:
    module.tag = "out"
    module.train()


def set_in_a_part(module: Module, step: int) -> None:
    module.inner.train(step % 2 == 0)


def taken_away(module: Module, step: int) -> None:
    if hasattr(module, "tag"):
        del module.tag


@pytest.mark.every_case
@pytest.mark.parametrize("change", [set_otherwise, set_in_a_part, taken_away], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "build", [text, nothing, an_array, the_mode, the_mode_twice], ids=lambda b: b.__name__
)
def test_what_is_only_set_is_there_after_each_step(
    build: Build, change: Callable[[Any, int], object]
) -> None:
    assert compared(build, change, 12) <= 2


# --- containers and objects -----------------------------------------------------------------------------------------------


def a_deque(self: Any, x: torch.Tensor) -> Any:
    self.m.queue.append(self.m.count)
    self.m.count += 1
    return x * sum(self.m.queue)


def a_set(self: Any, x: torch.Tensor) -> Any:
    self.m.seen.add(self.m.count % 3)
    self.m.count += 1
    return x * len(self.m.seen)


def a_list_from_its_beginning(self: Any, x: torch.Tensor) -> Any:
    self.m.items.insert(0, self.m.count)
    self.m.count += 1
    return x * self.m.items[0] + len(self.m.items)


def a_key_of_a_dict(self: Any, x: torch.Tensor) -> Any:
    self.m.table[self.m.count] = self.m.count
    self.m.count += 1
    return x * sum(self.m.table.values())


def a_number_of_numpy(self: Any, x: torch.Tensor) -> Any:
    self.m.number += 1
    return x * float(self.m.number)


def an_object(self: Any, x: torch.Tensor) -> Any:
    self.m.holder = SimpleNamespace(n=self.m.holder.n + 1)
    return x * self.m.holder.n


def a_new_list(self: Any, x: torch.Tensor) -> Any:
    self.m.items = [*self.m.items, 1]
    return x * len(self.m.items)


CONTAINERS = [
    *(a_deque, a_set, a_list_from_its_beginning, a_key_of_a_dict, a_number_of_numpy, an_object, a_new_list),
]


@pytest.mark.parametrize("build", CONTAINERS, ids=lambda b: b.__name__)
def test_each_step_goes_on_from_what_the_last_one_left(build: Build) -> None:
    compared(build, lambda _module, _step: None, 5)


# --- an object without attributes ---------------------------------------------------------------------------------------


class Empty:
    level = 2.0

    @functools.cached_property
    def cached(self) -> float:
        return self.level


def a_cached_property(self: Any, x: torch.Tensor) -> Any:
    return x * self.box.cached


def a_first_attribute(self: Any, x: torch.Tensor) -> Any:
    self.box.tag = "in"
    return x * 2


@pytest.mark.parametrize("build", [a_cached_property, a_first_attribute], ids=lambda b: b.__name__)
def test_an_object_gets_its_first_attribute(build: Build) -> None:
    plain, graph = sides(build)
    plain.box, graph.box = Empty(), Empty()
    for step in range(6):
        if step == 3:
            vars(plain.box).clear()
            vars(graph.box).clear()
        assert torch.equal(plain.build(X), graph(X)), step
        assert vars(plain.box) == vars(graph.box), step
    assert len(graph.builds) <= 2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__mean__ = self.linear(x)
        self.__spread__ = 2.0
        return self.__mean__ * self.__spread__


def test_attributes_with_underscores_on_both_sides_are_attributes() -> None:
    encoder = Encoder()
    graph = mg.trace(lambda x: encoder(x))
    for factor in (1.0, 2.0):
        assert torch.equal(graph(X * factor), encoder(X * factor))
        assert torch.equal(encoder.__mean__, encoder.linear(X * factor))
    assert len(graph.builds) <= 2


class Box:
    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


def an_attribute(self: Any, x: torch.Tensor) -> Any:
    h = self.linear(x) + self.state.h
    self.state = Box(h.detach())
    return h.sum()


def an_entry(self: Any, x: torch.Tensor) -> Any:
    h = self.linear(x) + self.state["last"].h
    self.state["last"] = Box(h.detach())
    return h.sum()


def an_item(self: Any, x: torch.Tensor) -> Any:
    h = self.linear(x) + self.state[-1].h
    self.state.append(Box(h.detach()))
    return h.sum()


@pytest.mark.parametrize(
    ("build", "state"),
    [
        (an_entry, lambda: {"last": Box(torch.zeros(3))}),
        (an_item, lambda: [Box(torch.zeros(3))]),
    ],
    ids=lambda item: item.__name__,
)
def test_an_object_with_tensors_in_place_of_one_that_is_read_is_refused(
    build: Build, state: Callable[[], Any]
) -> None:
    _, graph = sides(build)
    graph.linear, graph.state = nn.Linear(3, 3), state()
    with pytest.raises(
        mg.CaptureError, match=r"an object that holds tensors of the step into (graph\.)?state"
    ):
        graph(X)


def test_an_object_with_tensors_takes_the_place_of_the_one_in_an_attribute() -> None:
    plain, graph = sides(an_attribute)
    graph.linear = plain.linear = nn.Linear(3, 3)
    plain.state, graph.state = Box(torch.zeros(3)), Box(torch.zeros(3))
    for factor in (1.0, 2.0, 3.0):
        assert torch.equal(plain.build(X * factor), graph(X * factor))
        assert torch.equal(plain.state.h, graph.state.h)


def test_a_function_whose_default_is_a_tensor_of_the_step_is_refused() -> None:
    def build(self: Any, x: torch.Tensor) -> Any:
        doubled = x * 2
        self.kept["later"] = lambda y=doubled: y
        return doubled + 1

    _, graph = sides(build)
    graph.kept = {}
    with pytest.raises(mg.CaptureError, match="an object that holds tensors of the step into kept"):
        graph(X)


def test_a_returned_function_whose_default_is_a_tensor_of_the_step_is_refused() -> None:
    _, graph = sides(lambda self, x: lambda y=x * 2: y)
    with pytest.raises(mg.CaptureError, match="function that holds tensors of the step"):
        graph(X)
