"""An attribute that code does not ask for counts if its value is got at in another way: past the attribute, or in another place."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import operator
import types
from collections import ChainMap, OrderedDict, UserList, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import monograph as mg

X = torch.ones(2, 3)
NUMBERS = (2.0, 4.0, 6.0)
HELD: dict[str, Any] = {}


class Pair(NamedTuple):
    items: list[float]
    index: int


class Plain:
    items: list[float]


class Slotted:
    __slots__ = ("items",)
    items: list[float]


def closing_over(items: list[float]) -> Callable[[], list[float]]:
    return lambda: items


def given(items: list[float], holder: Any) -> Any:
    holder.items = items
    return holder


# how the graph holds the list in another place, and how a step reads it there
PLACES: dict[str, tuple[Callable[[list[float]], Any], Callable[[Any], float]]] = {
    "itself": (lambda items: items, lambda held: held[0]),
    "tuple": (lambda items: (items, 1), lambda held: held[0][0]),
    "named tuple": (lambda items: Pair(items, 0), lambda held: held.items[held.index]),
    "dicts": (lambda items: {"x": {"y": items}}, lambda held: held["x"]["y"][0]),
    "lists": (lambda items: [[items]], lambda held: held[0][0][0]),
    "deque": (lambda items: deque([items]), lambda held: held[0][0]),
    "ordered dict": (lambda items: OrderedDict(a=items), lambda held: held["a"][0]),
    "chain map": (lambda items: ChainMap({"a": items}), lambda held: held["a"][0]),
    "user list": (lambda items: UserList([items]), lambda held: held[0][0]),
    "proxy": (lambda items: types.MappingProxyType({"a": items}), lambda held: held["a"][0]),
    "namespace": (lambda items: types.SimpleNamespace(a=items), lambda held: held.a[0]),
    "object": (lambda items: given(items, Plain()), lambda held: held.items[0]),
    "slots": (lambda items: given(items, Slotted()), lambda held: held.items[0]),
    "module": (lambda items: given(items, nn.Module()), lambda held: held.items[0]),
    "closure": (closing_over, lambda held: held()[0]),
    "default": (lambda items: lambda found=items: found, lambda held: held()[0]),
    "partial": (lambda items: functools.partial(lambda found: found, items), lambda held: held()[0]),
    "method": (lambda items: items.__getitem__, lambda held: held(0)),
    "iterator": (itertools.repeat, lambda held: next(held)[0]),
    "global": (lambda items: HELD.update(items=items), lambda held: HELD["items"][0]),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_list_that_is_read_in_another_place(place: str) -> None:
    hold, read = PLACES[place]

    class Reading(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.items = [NUMBERS[0]]
            self.held = hold(self.items)

        def build(self, x: torch.Tensor, keeps: bool = False) -> torch.Tensor:
            if keeps:
                self.items.append(1.0)
            return x.sum() * read(self.held)

    step = Reading()
    for step.items[0] in NUMBERS:
        assert step(X) == X.sum() * step.items[0]


class Values(nn.Module):
    """What a step reads past its attributes."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.number, self.items, self.table = 0.0, [0.0], {"number": 0.0}
        self.read = read
        self.move(NUMBERS[0])

    def move(self, number: float) -> None:
        self.number = self.items[0] = self.table["number"] = number

    def behind(self) -> float:
        found: float = super().__getattribute__("number")
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self)


class Bypassing(Values):
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def _of_kind(module: Any, kind: type) -> Iterator[Any]:
    return (value for value in vars(module).values() if value.__class__ is kind)


WAYS: dict[str, Callable[[Any], float]] = {
    "copy": lambda module: copy.copy(module).number,
    "deep copy": lambda module: copy.deepcopy(module).table["number"],
    "vars": lambda module: vars(module)["number"],
    "values": lambda module: next(_of_kind(module, float)),
    "list among values": lambda module: next(_of_kind(module, list))[0],
    "names": lambda module: {name: getattr(module, name) for name in module.__dict__}["number"],
    "dir": lambda module: getattr(module, next(name for name in dir(module) if name == "number")),
    "super": lambda module: module.behind(),
    "of the class": lambda module: type(module).__getattribute__(module, "number"),
    "of nn.Module": lambda module: nn.Module.__getattribute__(module, "number"),
    "attrgetter": operator.attrgetter("number"),
    "format": lambda module: float("{0.number}".format(module)),  # noqa: UP030, UP032
    "static": lambda module: inspect.getattr_static(module, "number"),
    "state": lambda module: module.__getstate__()["number"],
    "reduced": lambda module: module.__reduce_ex__(2)[2]["items"][0],
    "union": lambda module: (vars(module) | {})["table"]["number"],
    "namespace": lambda module: types.SimpleNamespace(**vars(module)).number,
}


@pytest.mark.parametrize("kind", [Values, Bypassing])
@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_of_a_module_that_is_read_in_another_way(way: str, kind: type[Values]) -> None:
    module = kind(WAYS[way])
    step = mg.trace(module)
    for number in NUMBERS:
        module.move(number)
        assert torch.equal(step(X), X * number)
