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


@pytest.mark.every_case
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


@pytest.mark.every_case
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


@pytest.mark.every_case
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


# --- what build() changes in them ----------------------------------------------------------------------------------------


def count(d: Any) -> Any:
    d["n"] += 1.0
    d["kept"].append(d["x"] * d["n"])
    del d["kept"][:-2]
    return d["x"] * d["n"]


def keep_a_cache(past: Any) -> Any:
    past[0] = past[0] * 0.5 + X
    return past[0]


def update(d: Any) -> Any:
    d.update(y=d["x"] * 2, z=3, w=[d["x"], (d["x"] + 1, "a")])
    return d["y"]


def sort(d: Any) -> Any:
    d["order"].sort(key=abs)
    d["order"].reverse()
    return d["x"] * d["order"][0]


def move_about(d: Any) -> Any:
    d["a"]["b"].append(d["x"])
    d["a"]["m"] = d.pop("l")
    d["l"] = d["a"]["m"][:]
    return d["x"] * 2


def order(d: Any) -> Any:
    d.move_to_end("x")
    d["sum"] = d["x"].sum().item()
    return d["x"] + d["sum"]


def put_attribute(n: Any) -> Any:
    n.k = n.a * 2
    return n.k + 1


def change_fields(d: Any) -> Any:
    d.x = d.x * 2
    d.k = d.k * 1.5
    return d.x * d.k


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "a count and a list": (count, lambda: {"n": 0.0, "kept": [], "x": X.clone()}),
    "a cache": (keep_a_cache, lambda: [X.clone()]),
    "an update": (update, lambda: {"x": X.clone()}),
    "a sorted list": (sort, lambda: {"order": [3, -1, 2], "x": X.clone()}),
    "lists in dicts": (move_about, lambda: {"x": X.clone(), "l": [1, 2.0], "a": {"b": []}}),
    "a read of what is missing": (lambda d: d["x"] + d["q"], lambda: defaultdict(int, x=X.clone())),
    "an ordered dict": (order, lambda: OrderedDict(x=X.clone(), y=1)),
    "a cached property": (lambda d: d.doubled + 1, lambda: Batch(X.clone())),
    "an attribute of a named tuple": (put_attribute, lambda: Attributed(X.clone(), 1)),
    "slots of a dataclass": (change_fields, lambda: Slotted(X.clone(), 3.0)),  # type: ignore[arg-type]
    "a dict that is a dataclass": (
        lambda d: d.setdefault("z", d.x * 3) + 1,
        lambda: Output(X.clone()),
    ),
}


def shown(item: Any) -> Any:
    """All that a nested value holds, with its order, as text."""
    if isinstance(item, dict):
        entries = [(key, shown(value)) for key, value in item.items()]
        return type(item).__name__, entries, shown(getattr(item, "__dict__", None) or None)
    if isinstance(item, (list, tuple)):
        return (
            type(item).__name__,
            [shown(value) for value in item],
            shown(getattr(item, "__dict__", None) or None),
        )
    names = list(getattr(item, "__dict__", {})) or getattr(type(item), "__slots__", ())
    if names and not isinstance(item, torch.Tensor):
        return type(item).__name__, [(name, shown(getattr(item, name))) for name in names]
    return repr(item)


COMPILED = ["a count and a list", "a cache", "an ordered dict"]  # what follows the program is the same


@pytest.mark.parametrize(
    ("name", "backend"), [*((n, "aten") for n in CHANGES), *((n, "inductor") for n in COMPILED)]
)
def test_what_build_changes_in_them_reaches_the_caller(name: str, backend: Any) -> None:
    function, make = CHANGES[name]
    step, expected, given = step_of(function), make(), make()
    step.config.backend(backend)
    for _ in range(3):
        assert shown(function(expected)) == shown(step(given))
        assert shown(expected) == shown(given)
    again, other = make(), make()  # each call writes into what it was given
    function(again)
    step(other)
    assert shown(again) == shown(other)
    assert shown(expected) == shown(given)
    eager = make()
    step.eager(eager)
    assert shown(eager) == shown(again)
    fresh = make()
    assert step.verify(fresh, steps=2).ok
    assert shown(fresh) == shown(make())


def test_a_label_that_is_taken_out_of_a_batch() -> None:
    model = nn.Linear(2, 1)

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def build(self, batch: Any) -> Any:
            labels = batch.pop("labels")
            loss = (self.model(batch["x"]) - labels).square().mean()
            loss.backward()
            return loss

    step = Step()
    for k in range(2):
        batch = {"x": torch.ones(3, 2) * k, "labels": torch.ones(3, 1)}
        step(batch)
        assert list(batch) == ["x"]
    assert len(step.builds) == 1


def test_an_entry_that_gets_another_name() -> None:
    def rename(d: Any) -> Any:
        d["image"] = d.pop("x")
        return d["image"] * 2

    step = step_of(rename)
    for x in (X, X + 1):
        table = {"x": x}
        assert torch.equal(step(table), x * 2)
        assert list(table) == ["image"]
        assert table["image"] is x


def test_what_is_unchanged_stays_the_very_same() -> None:
    def put(d: Any) -> Any:
        d["h"] = d["x"] * 2
        return d["h"]

    step = step_of(put)
    inside, big, x = [X], 10**30, X.clone()
    table = {"x": x, "inside": inside, "big": big}
    for _ in range(2):
        returned = step(table)
        assert table["x"] is x
        assert table["inside"] is inside
        assert table["big"] is big
        assert table["h"] is returned
        assert list(table) == ["x", "inside", "big", "h"]


def test_a_step_that_fails_changes_no_container() -> None:
    def fail(d: Any) -> Any:
        d["y"] = 1
        raise ValueError("nothing was done")

    table = {"x": X}
    with pytest.raises(ValueError, match="nothing was done"):
        step_of(fail)(table)
    assert list(table) == ["x"]


SHARED = [X.clone()]


def grow(a: Any, b: Any) -> Any:
    a.append(a[0] + 1)
    return a[0] + len(b) + len(SHARED)


def test_a_container_that_is_known_twice_is_refused() -> None:
    step, items = step_of(grow), [X.clone()]
    for _ in range(2):
        with pytest.raises(
            mg.CaptureError, match=r"changes argument \*?args\[0\], and argument .* is the same"
        ):
            step(items, items)
        with pytest.raises(mg.CaptureError, match="finds the same object outside of its arguments"):
            step(SHARED, [X])
        assert len(items) == len(SHARED) == 1
        step([X], [X])  # a build that is there changes nothing about it


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.me = x, self


def put_opaque(d: Any) -> Any:
    d["y"] = Opaque(d["x"] * 2)
    return d["x"] * 1


def put_as_key(d: Any) -> Any:
    d[d["x"] * 2] = 1
    return d["x"] * 1


def set_factory(d: Any) -> Any:
    d.default_factory = list
    return d["x"] * 1


@pytest.mark.parametrize("function", [put_opaque, put_as_key, set_factory])
def test_what_cannot_be_left_in_a_container_is_refused(function: Callable[[Any], Any]) -> None:
    table = defaultdict(int, x=X.clone())
    with pytest.raises(mg.CaptureError, match=r"argument (\*?args\[0\]|d)") as caught:
        step_of(function)(table)
    assert caught.value.hint
    assert list(table) == ["x"]


def test_micro_batches_have_containers_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    step = step_of(lambda d: d.pop("x") * 2)
    step.config.set_gradient_accumulation_steps(2)
    table = {"x": torch.ones(4)}
    step(table)
    assert list(table) == ["x"]
    assert "the caller's stays as it is" in caplog.text


def test_an_artifact_goes_on_in_no_argument(tmp_path: Any) -> None:
    step = step_of(keep_a_cache)
    step([X.clone()])
    with pytest.raises(mg.MonographError, match="puts new content into argument"):
        mg.save(step, tmp_path / "step")
