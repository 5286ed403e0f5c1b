"""Containers among arguments and results are rebuilt with all that they hold, or refused by name."""

from __future__ import annotations

import datetime
import enum
import functools
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

X = torch.tensor([1.25, -3.0])
Pair = namedtuple("Pair", "a b")


def step_of(function: Callable[..., Any]) -> mg.Graph:
    class Step(mg.Graph):
        def build(self, *args: Any) -> Any:
            return function(*args)

    return Step()


def with_attributes(item: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        item.__dict__[name] = value
    return item


@dataclass
class Batch:
    x: torch.Tensor
    scale = 1

    def __post_init__(self) -> None:
        self.scale = 3

    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return self.x * 2


@dataclass
class WithInit:
    x: torch.Tensor
    k: InitVar[int] = 2

    def __post_init__(self, k: int) -> None:
        self.kept = k


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    k: int = 3


class Table(dict):  # type: ignore[type-arg]
    k = 9


class Counted(defaultdict):  # type: ignore[type-arg]
    pass


def moved_to_end(table: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
    table.move_to_end("x")
    return table


class Hundredfold(dict):  # type: ignore[type-arg]
    def values(self) -> Any:
        return [value * 100 for value in dict.values(self)]


class FilledByInit(dict):  # type: ignore[type-arg]
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self["x"] = x


class Ordered(OrderedDict):  # type: ignore[type-arg]
    pass


@dataclass
class Output(dict):  # type: ignore[type-arg]
    x: Any = None

    def __post_init__(self) -> None:
        self["x"] = self.x


class Counting(Pair):
    def __new__(cls, a: Any, b: Any) -> Any:
        return super().__new__(cls, a, b + 1)


class Attributed(Pair):
    k = 9


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def extended_output() -> Any:
    output = Output(X)
    output["z"] = X * 3
    return output


# what a step computes of one argument, and arguments that give different numbers or kinds
CASES: dict[str, tuple[Callable[[Any], torch.Tensor], list[Callable[[], Any]]]] = {
    "attributes beside the fields": (
        lambda d: d.x * d.scale,
        [lambda: Batch(X), lambda: with_attributes(Batch(X), scale=5), lambda: Batch(X)],
    ),
    "a filled cached property": (
        lambda d: d.doubled,
        [lambda: Batch(X), lambda: with_attributes(Batch(X), doubled=X * 7)],
    ),
    "what __post_init__ kept": (lambda d: d.x * d.kept, [lambda: WithInit(X), lambda: WithInit(X, 5)]),
    "slots": (lambda d: d.x * d.k, [lambda: Slotted(X), lambda: Slotted(X, 4)]),
    "a defaultdict": (
        lambda d: d["x"] * (2 if d.default_factory else 3) + (d["q"] if d.default_factory else 0),
        [lambda: defaultdict(int, x=X), lambda: defaultdict(None, x=X), lambda: defaultdict(float, x=X)],
    ),
    "a defaultdict of its own": (
        lambda d: d["x"] * d["k"],
        [lambda: Counted(lambda: 2, x=X), lambda: Counted(lambda: 3, x=X)],
    ),
    "the order of an ordered dict": (
        lambda d: d["x"] * (1 + list(d).index("x")),
        [lambda: moved_to_end(OrderedDict(x=X, y=1)), lambda: OrderedDict(x=X, y=1)],
    ),
    "attributes of a dict": (
        lambda d: d["x"] * d.k,
        [lambda: with_attributes(Table(x=X), k=1), lambda: with_attributes(Table(x=X), k=2), lambda: Table(x=X)],
    ),
    "values of its own": (lambda d: d["x"] * d["k"], [lambda: Hundredfold(x=X, k=2)]),
    "a dict that fills itself": (lambda d: d["x"] * len(d), [lambda: FilledByInit(X)]),
    "an ordered dict of its own": (
        lambda d: d["x"] * (1 + list(d).index("x")),
        [lambda: Ordered(x=X, y=1), lambda: Ordered(y=1, x=X)],
    ),
    "a dict that is a dataclass": (
        lambda d: d["x"] + d.x * len(d),
        [lambda: Output(X), extended_output],
    ),
    "a named tuple that counts": (lambda n: n.a * n.b, [lambda: Counting(X, 1), lambda: Counting(X, 2)]),
    "attributes of a named tuple": (
        lambda n: n.a * n.k,
        [lambda: with_attributes(Attributed(X, 1), k=1), lambda: Attributed(X, 1)],
    ),
    "ranges as keys": (
        lambda d: X * next(iter(d)).stop,
        [lambda: {range(0, 5, 2): X}, lambda: {range(0, 6, 2): X}],
    ),
    "decimals as keys": (
        lambda d: X * len(str(next(iter(d)))),
        [lambda: {Decimal("1.0"): X}, lambda: {Decimal("1.00"): X}],
    ),
    "moments as keys": (
        lambda d: X * (next(iter(d)).fold + 1),
        [lambda: {datetime.datetime(2020, 1, 1): X}, lambda: {datetime.datetime(2020, 1, 1, fold=1): X}],
    ),
    "named tuples as keys": (
        lambda d: X * (2 if next(iter(d)).b is True else 3),
        [lambda: {Pair(1, 1): X}, lambda: {Pair(1, True): X}],
    ),
    "attributes of a tensor": (
        lambda t: t * t.k,
        [lambda: with_attributes(X.clone(), k=1), lambda: with_attributes(X.clone(), k=2)],
    ),
    "a parameter or a tensor": (
        lambda t: t.detach() * (2 if isinstance(t, nn.Parameter) else 3),
        [lambda: nn.Parameter(X), lambda: X.clone().requires_grad_()],
    ),
    "members of an enum": (lambda e: X * (2 if e is Color.RED else 3), [lambda: Color.RED, lambda: Color.BLUE]),
    "the type of a tensor": (lambda t: t * (2 if type(t) is torch.Tensor else 3), [X.clone]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_arguments(name: str) -> None:
    function, makers = CASES[name]
    step = step_of(function)
    for _ in range(2):
        for make in makers:
            assert torch.equal(step(make()), function(make()))
    assert len(step.builds) <= len(makers)


def test_attributes_of_a_member_of_an_enum_are_guarded() -> None:
    step = step_of(lambda member: X * member.weight)  # type: ignore[attr-defined]
    for weight in (1, 2):
        Color.RED.weight = weight  # type: ignore[attr-defined]
        assert torch.equal(step(Color.RED), X * weight)


class Text(str):
    pass


class Number(float):
    pass


class Whole(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@dataclass
class Listed(list):  # type: ignore[type-arg]
    x: Any = None


@pytest.mark.parametrize(
    "make",
    [lambda: with_attributes(Text("a"), k=1), lambda: Number(1.5), lambda: Whole(1), lambda: Listed(X)],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(mg.SignatureError, match="which a graph cannot take"):
        step_of(lambda item: X * 2)(make())


RESULTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "a defaultdict": (lambda x: defaultdict(list, x=x * 2), lambda r: (r.default_factory, r["x"])),
    "attributes of a dict": (
        lambda x: with_attributes(Table(x=x * 2), k=1, t=x * 3),
        lambda r: (r.k, r["x"], r.t),
    ),
    "attributes beside the fields": (
        lambda x: with_attributes(Batch(x * 2), t=[x * 3]),
        lambda r: (r.scale, r.x, r.t[0]),
    ),
    "attributes of a named tuple": (
        lambda x: with_attributes(Attributed(x * 2, 1), k=x * 3),
        lambda r: (r.a, r.b, r.k),
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    function, parts = RESULTS[name]
    step = step_of(function)
    for _ in range(2):
        expected, got = function(X), step(X)
        assert type(expected) is type(got)
        for one, other in zip(parts(expected), parts(got), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_functions_of_one_def_are_one_factory() -> None:
    step = step_of(lambda d: d["x"] * d["k"])
    for _ in range(3):
        assert torch.equal(step(defaultdict(lambda: 2, x=X)), X * 2)
    assert len(step.builds) == 1
