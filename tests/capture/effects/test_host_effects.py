"""What build() changes in Python objects: the same values as in eager mode, step by step."""

from __future__ import annotations

import gc
import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from monograph.capture.guards.sources import hidden

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
TABLE = {"n": 0}
LOG: list[int] = []
RATE = 20.0


class Plain:
    """What build() runs on in plain PyTorch."""


class Counter:
    calls = 0


def numbers() -> Iterator[float]:
    for number in itertools.count(1):
        yield float(number)


class Skipping(nn.Module):
    """Stochastic depth with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.random.random() < 0.5 else x * self.scale


def count_in_a_global_dict(self: Any, x: torch.Tensor) -> Any:
    TABLE["n"] += 1
    return x * TABLE["n"]


def change_a_global(self: Any, x: torch.Tensor) -> Any:
    global RATE
    RATE /= 4
    return x * RATE


def append_to_a_global(self: Any, x: torch.Tensor) -> Any:
    LOG.append(3)
    return x * len(LOG)


def count_on_a_class(self: Any, x: torch.Tensor) -> Any:
    Counter.calls += 1
    return x * Counter.calls


def count_on_the_graph(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * self.n


def count_past_setattr(self: Any, x: torch.Tensor) -> Any:
    self.__dict__["n"] = self.__dict__.get("n", 0) + 1
    return x * self.__dict__["n"]


def count_in_an_object(self: Any, x: torch.Tensor) -> Any:
    vars(self.box)["n"] = vars(self.box)["n"] + 1
    return x * self.box.n


def append_to_an_attribute(self: Any, x: torch.Tensor) -> Any:
    self.box.items.append(1)
    return x * len(self.box.items)


def draw(self: Any, x: torch.Tensor) -> Any:
    return x * self.box.random()


def advance(self: Any, x: torch.Tensor) -> Any:
    return x * next(self.box)


def skip(self: Any, x: torch.Tensor) -> Any:
    return self.box(x)


def only_write(self: Any, x: torch.Tensor) -> Any:
    LEFT.last = 3
    return x * 2


LEFT = SimpleNamespace()

CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "a global dict": (count_in_a_global_dict, object),
    "a global": (change_a_global, object),
    "a global list": (append_to_a_global, object),
    "a class": (count_on_a_class, object),
    "the graph": (count_on_the_graph, object),
    "the dict of the graph": (count_past_setattr, object),
    "vars of an object": (count_in_an_object, lambda: SimpleNamespace(n=0)),
    "a list": (append_to_an_attribute, lambda: SimpleNamespace(items=[])),
    "random.Random": (draw, lambda: random.Random(0)),
    "a generator of numpy": (draw, lambda: np.random.default_rng(0)),
    "an old generator of numpy": (draw, lambda: np.random.RandomState(0)),
    "itertools.count": (advance, lambda: itertools.count(1)),
    "itertools.count in another": (advance, lambda: map(float, itertools.count(1))),
    "a generator in another": (advance, lambda: map(float, numbers())),
    "an iterator that does not say where it is": (advance, lambda: iter(memoryview(b"12345"))),
    "itertools.cycle": (advance, lambda: itertools.cycle([1.0, 2.0, 3.0])),
    "a list's iterator": (advance, lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0])),
    "a generator": (advance, numbers),
    "stochastic depth": (skip, Skipping),
    "what is only written": (only_write, object),
}


def outside() -> tuple[Any, ...]:
    return dict(TABLE), list(LOG), RATE, Counter.calls, dict(vars(LEFT))


def put_outside(values: tuple[Any, ...]) -> None:
    global RATE
    table, log, RATE, Counter.calls, left = values
    TABLE.clear()
    TABLE.update(table)
    LOG[:] = log
    vars(LEFT).clear()
    vars(LEFT).update(left)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_python_is_changed_as_in_eager_mode(name: str) -> None:
    build, make = CASES[name]
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (Plain,), {"build": build})()
    for side in (graph, plain):
        side.box, side.n = make(), 0
    for call in range(4):
        before = outside()
        expected = plain.build(X)
        after = outside()
        put_outside(before)
        assert torch.equal(expected, graph(X)), f"call {call}"
        assert outside() == after
        assert graph.n == plain.n
    if name == "what is only written":
        assert len(graph.builds) == 1


def of_python(source: random.Random) -> Any:
    return source.getstate()


def of_numpy(source: np.random.RandomState) -> Any:
    name, key, *others = source.get_state()
    return name, key.tolist(), others


def of_torch(source: torch.Generator) -> Any:
    return source.get_state().tolist()


NORMAL: dict[str, tuple[Callable[[], Any], Callable[[Any], float | torch.Tensor], Callable[[Any], Any]]] = {
    "gauss": (lambda: random.Random(1), lambda source: source.gauss(0, 1), of_python),
    "two of gauss": (
        lambda: random.Random(1),
        lambda source: source.gauss(0, 1) + source.gauss(0, 1),
        of_python,
    ),
    "normalvariate": (lambda: random.Random(1), lambda source: source.normalvariate(0, 1), of_python),
    "numpy": (lambda: np.random.RandomState(1), lambda source: source.randn(), of_numpy),
    "torch": (
        lambda: torch.Generator().manual_seed(1),
        lambda source: torch.randn(1, generator=source, dtype=torch.float64),
        of_torch,
    ),
}  # what draws normal numbers makes two at once, and keeps the second one


@pytest.mark.parametrize("first", [0, 1], ids=["from the first", "from the second"])
@pytest.mark.parametrize("name", NORMAL)
def test_normal_numbers_are_those_of_eager_mode(name: str, first: int) -> None:
    make, draw_one, state = NORMAL[name]

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.source = make()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * draw_one(self.source)

    graph, plain, x = Step(), make(), X.double()
    for source in (graph.source, plain):
        for _ in range(first):
            draw_one(source)
    for call in range(5):
        assert torch.equal(x * draw_one(plain), graph(x)), f"call {call}"
        assert state(graph.source) == state(plain), f"call {call}"


def test_normal_numbers_of_python_itself_are_those_of_eager_mode() -> None:
    step = type("Step", (mg.Graph,), {"build": lambda self, x: x * random.gauss(0, 1) * np.random.randn()})()
    plain, numpy, x = random.Random(5), np.random.RandomState(5), X.double()
    kept = random.getstate(), np.random.get_state()
    try:
        random.seed(5)
        np.random.seed(5)
        for call in range(5):
            assert torch.equal(x * plain.gauss(0, 1) * numpy.randn(), step(x)), f"call {call}"
            assert random.getstate() == plain.getstate(), f"call {call}"
            assert of_numpy(np.random) == of_numpy(numpy), f"call {call}"  # type: ignore[arg-type]
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def test_an_iterator_whose_place_is_read_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of itertools are since Python 3.12; in a process where warnings are errors it moves, too."""
    reduced = hidden._reduced

    def deprecated(item: Any) -> Any:
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        return reduced(item)

    monkeypatch.setattr(hidden, "_reduced", deprecated)
    step = type("Step", (mg.Graph,), {"build": advance})()
    step.box, plain = (itertools.islice(range(1, 9), 8) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in range(3):
            assert torch.equal(step(X), X * next(plain)), f"call {call}"


def test_compile_changes_nothing_outside() -> None:
    before = outside()
    step = type("Step", (mg.Graph,), {"build": count_in_a_global_dict})()
    step.compile(X)
    assert outside() == before
    assert torch.equal(step(X), X * (before[0]["n"] + 1))


def test_what_moves_is_said() -> None:
    step = type("Step", (mg.Graph,), {"build": advance})()
    step.box = itertools.count(1)
    step(X)
    assert "build() changes graph.box in a way that only a new capture can repeat" in step.explain()


def look_at_the_clock(self: Any, x: torch.Tensor) -> Any:
    started = time.perf_counter()
    return x * 2 + 0 * started


def draw_from_the_system(self: Any, x: torch.Tensor) -> Any:
    return x * random.SystemRandom().random()


def read_a_text(self: Any, x: torch.Tensor) -> Any:
    return x * len(str(x + 1))


def read_a_text_in_another_text(self: Any, x: torch.Tensor) -> Any:
    return x * len(f"{x}, and more")


def read_a_version(self: Any, x: torch.Tensor) -> Any:
    return x * COUNTED._version


COUNTED = torch.ones(2)
UNGUARDED = [
    (read_a_version, "the version of a tensor"),
    (read_a_text, "the text of a tensor"),
    (read_a_text_in_another_text, "the text of a tensor"),
    (look_at_the_clock, "the clock"),
    (advance, "graph.box"),
    (draw_from_the_system, "random bytes of the system"),
]


@pytest.mark.parametrize(("build", "what"), UNGUARDED)
def test_what_cannot_be_guarded_is_an_error_if_asked_for(build: Any, what: str) -> None:
    for strict in (False, True):
        step = type("Step", (mg.Graph,), {"build": build})()
        step.box = itertools.count(1)
        step.config.strict(strict)
        if strict:
            with pytest.raises(mg.CaptureError, match=what):
                step(X)
        else:
            step(X)
            assert what in step.explain()
            if what == "the clock" or what.endswith("of a tensor"):
                line = build.__code__.co_firstlineno + 1
                assert f"test_host_effects.py:{line}" in step.explain()


def test_what_runs_when_memory_is_collected_is_no_part_of_a_step() -> None:
    def collected(_phase: str, _info: Any) -> None:
        TABLE["collections"] = TABLE.get("collections", 0) + 1

    def build(self: Any, x: torch.Tensor) -> Any:
        gc.collect()
        return x * 2

    gc.callbacks.append(collected)
    try:
        step = type("Step", (mg.Graph,), {"build": build})()
        for _ in range(3):
            step(X)
            gc.collect()
        assert len(step.builds) == 1
    finally:
        gc.callbacks.remove(collected)
        TABLE.pop("collections")


class Model(nn.Module):
    """A model on which a script keeps books."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.global_step, self.best = 0, None
        self.history: list[float] = []
        self.metrics = {"loss": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def test_books_that_nothing_reads_cost_no_build() -> None:
    model = Model()

    def build(self: Any, x: torch.Tensor) -> Any:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    step = type("Step", (mg.Graph,), {"build": build})()
    step.model, step.seen, step.losses = model, 0, []
    step.add_optimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(50):
        loss = step(torch.randn(4, 3)).item()
        model.global_step += 1
        model.history.append(loss)
        model.metrics["loss"] = model.best = loss
        step.seen += 1
        step.losses.append(loss)
    assert len(step.builds) == 1


BOX: dict[str, Any] = {"last": None}


def test_a_new_object_at_each_step() -> None:
    class Step(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            BOX["last"] = SimpleNamespace(n=0)
            return x * 2

    graph, made = Step(), []
    for _ in range(3):
        graph(X)
        assert BOX["last"].n == 0
        BOX["last"].n = 5
        made.append(BOX["last"])
        BOX["last"] = None  # as when the step began: what it makes is another one all the same
    assert len(set(map(id, made))) == 3
