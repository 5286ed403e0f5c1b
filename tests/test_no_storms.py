"""A step that keeps counters and books: the numbers and the books of eager mode, and hardly more than one build."""

from __future__ import annotations

import abc
import copy
import functools
import importlib
import json
import logging
import math
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from monograph.capture.guards.sources.lookup import ClassEntries, class_table
from tests.support import assert_same

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
LOGGER = logging.getLogger("tests.no_storms")
LOGGER.addHandler(logging.NullHandler())
STEP = 0
TOTAL = {"calls": 0}


class Counts:
    calls = 0


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@dataclass
class Config:
    n: int = 0
    rate: float = 1.0
    seen: dict[str, int] = field(default_factory=dict)


class Cached:
    def __init__(self) -> None:
        self.made = 0

    @functools.cached_property
    def scale(self) -> float:
        self.made += 1
        return 2.5


class Module(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls, self.average = 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.average = 0.9 * self.average + 0.1 * self.calls
        return self.layer(x)


def closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


def on_the_graph(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * 2


def used_in_the_step(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * self.n + 0.5**self.n


def in_a_module(self: Any, x: torch.Tensor) -> Any:
    return self.module(x) * self.module.average


def in_a_global(self: Any, x: torch.Tensor) -> Any:
    global STEP
    STEP += 1
    return x + STEP


def in_a_global_dict(self: Any, x: torch.Tensor) -> Any:
    TOTAL["calls"] += 1
    return x + TOTAL["calls"]


def on_a_class(self: Any, x: torch.Tensor) -> Any:
    Counts.calls += 1
    return x * Counts.calls


def in_slots(self: Any, x: torch.Tensor) -> Any:
    self.slotted.n += 1
    return x * self.slotted.n


def in_a_dataclass(self: Any, x: torch.Tensor) -> Any:
    self.settings.n += 1
    self.settings.rate *= 0.75
    return x * self.settings.rate


def in_a_namespace(self: Any, x: torch.Tensor) -> Any:
    self.box.n += 1
    vars(self.box)["m"] = vars(self.box)["m"] + self.box.n
    return x * self.box.n


def in_a_closure(self: Any, x: torch.Tensor) -> Any:
    return x * self.count()


def in_a_dict(self: Any, x: torch.Tensor) -> Any:
    self.seen["x"] = self.seen.get("x", 0) + 1
    return x * self.seen["x"]


def in_a_counter(self: Any, x: torch.Tensor) -> Any:
    self.counter["x"] += 1
    return x * self.counter["x"]


def in_a_defaultdict(self: Any, x: torch.Tensor) -> Any:
    self.default["x"] += 1
    return x * self.default["x"]


def in_an_ordered_dict(self: Any, x: torch.Tensor) -> Any:
    self.ordered["a"] += 1
    self.ordered["b"] += 0.5
    return x * self.ordered["b"]


def in_a_list(self: Any, x: torch.Tensor) -> Any:
    self.items[1] += 1
    return x * self.items[1]


def cached_property(self: Any, x: torch.Tensor) -> Any:
    return x * self.cached.scale


def made_lazily(self: Any, x: torch.Tensor) -> Any:
    if not hasattr(self, "lazy"):
        self.lazy = 3.0
    return x * self.lazy


def timed(self: Any, x: torch.Tensor) -> Any:
    self.started = time.time()
    y = x * 2
    self.average = self.average + (time.perf_counter() - self.started)
    return y


def logged(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    LOGGER.debug("step %d", self.n)
    return x * 2


def every_tenth(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    if self.n % 10 == 0:
        return x * self.n
    return x


def warm_up(self: Any, x: torch.Tensor) -> Any:
    rate = min(1.0, self.n / 100) * 0.5 * (1 + math.cos(math.pi * self.n / 50))
    self.n += 1
    return x * rate


def copied_elsewhere(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    self.last = self.n
    self.box.last = self.n * 2
    return x * 2


def in_a_loop(self: Any, x: torch.Tensor) -> Any:
    for _ in range(400):
        self.n += 1
    return x * self.n


def returned(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return {"x": x * 2, "n": x.sum() * 0 + self.n}


def wraps_around(self: Any, x: torch.Tensor) -> Any:
    self.n = (self.n + 1) % 7
    return x * self.n


def written_only(self: Any, x: torch.Tensor) -> Any:
    self.mode = 3
    return x * 2


CASES = [
    on_the_graph, used_in_the_step, in_a_module, in_a_global, in_a_global_dict, on_a_class, in_slots, in_a_dataclass,
    in_a_namespace, in_a_closure, in_a_dict, in_a_counter, in_a_defaultdict, in_an_ordered_dict, in_a_list,
    cached_property, made_lazily, logged, every_tenth, warm_up, copied_elsewhere, in_a_loop, returned, wraps_around,
    written_only,
]  # fmt: skip


def fill(side: Any) -> None:
    """What build() finds."""
    torch.manual_seed(0)
    side.n, side.module, side.slotted, side.settings = 0, Module(), Slotted(), Config()
    side.box, side.count = SimpleNamespace(n=0, m=1), closure()
    side.seen, side.counter, side.default = {}, Counter(), defaultdict(int)
    side.ordered, side.items, side.cached = OrderedDict(a=1, b=0.5), [1, 0, 2.0], Cached()


def books(side: Any) -> dict[str, Any]:
    """What it leaves behind, with the types."""
    found: dict[str, Any] = {name: getattr(side, name, None) for name in ("n", "last", "lazy", "mode")}
    found |= {"module": (side.module.calls, side.module.average), "slotted": side.slotted.n}
    found |= {"config": vars(side.settings).copy(), "box": vars(side.box).copy()}
    found |= {"closure": side.count.__closure__[0].cell_contents, "cached": vars(side.cached).copy()}
    found |= {name: dict(getattr(side, name)) for name in ("seen", "counter", "default", "ordered")}
    return found | {"items": list(side.items), "globals": (STEP, dict(TOTAL), Counts.calls)}


def sides(build: Callable[..., Any]) -> tuple[Any, Any]:
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    fill(graph)
    fill(plain)
    return graph, plain


def outside() -> tuple[Any, ...]:
    return STEP, dict(TOTAL), Counts.calls


def put_outside(values: tuple[Any, ...]) -> None:
    global STEP
    STEP, table, Counts.calls = values
    TOTAL.update(table)


def compared(
    build: Callable[..., Any],
    steps: int = 50,
    between: Callable[[Any, int], None] = lambda _side, _step: None,
) -> Any:
    """Run both sides and compare after each step; `between` changes a side before a step. Gives the graph."""
    graph, plain = sides(build)
    for step in range(steps):
        x = X + step
        before = outside()
        between(plain, step)
        expected = plain.build(x)
        after = books(plain)
        put_outside(before)
        between(graph, step)
        assert_same(expected, graph(x), f"step {step}")
        got = books(graph)
        assert repr(got) == repr(after), f"step {step}"
    return graph


@pytest.fixture(autouse=True)
def _outside_as_before() -> Any:
    before = outside()
    yield
    put_outside(before)


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_counters_cost_no_builds(build: Callable[..., Any]) -> None:
    graph = compared(build)
    assert len(graph.builds) <= 2, [item.reason for item in graph.builds]


def test_clocks_cost_no_builds() -> None:
    graph, _ = sides(timed)
    graph.average = 0.0
    for _ in range(50):
        graph(X)
    assert len(graph.builds) <= 2


def set_from_outside(side: Any, step: int) -> None:
    """Other values and other types, in the middle."""
    new = {5: 0, 10: -3, 14: 2.5, 18: True, 22: 10**30, 26: float("nan"), 30: -0.0, 34: 7, 38: 2**53}
    if step in new:
        side.n = new[step]


@pytest.mark.parametrize(
    "build",
    [on_the_graph, used_in_the_step, every_tenth, wraps_around, copied_elsewhere],
    ids=lambda b: b.__name__,
)
def test_values_from_outside_are_seen(build: Callable[..., Any]) -> None:
    if build is used_in_the_step:
        compared(build, 22, set_from_outside)
    else:
        compared(build, 45, set_from_outside)


def set_everywhere(side: Any, step: int) -> None:
    if step == 20:
        side.module.calls, side.slotted.n, side.settings.n, side.settings.rate = 0, 5, 3.5, 2
        side.box.n, side.box.m = 1, 0.5
        side.seen["y"] = 3
        side.counter["x"], side.default["x"], side.items[1] = 4, 2.5, 1.5
        side.ordered.move_to_end("a")
    if step == 30:
        side.slotted, side.settings, side.box = Slotted(), Config(), SimpleNamespace(m=2, n=3)
        side.seen, side.items = {"x": 0}, [0, 1]
        del side.counter["x"]


@pytest.mark.parametrize(
    "build",
    [in_a_module, in_slots, in_a_dataclass, in_a_namespace, in_a_dict, in_a_counter, in_a_defaultdict,
     in_an_ordered_dict, in_a_list],
    ids=lambda build: build.__name__,
)  # fmt: skip
def test_objects_changed_from_outside_are_seen(build: Callable[..., Any]) -> None:
    compared(build, 40, set_everywhere)


# --- numbers that the training script moves ------------------------------------------------------------------------------


def counts_and_scales(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * self.n * self.box.m


MOVED: dict[str, tuple[Callable[..., Any], Callable[[Any, int], Any]]] = {
    "an attribute": (lambda self, x: x * self.n, lambda side, step: setattr(side, "n", step * 0.25)),
    "an attribute of a module": (
        lambda self, x: x + self.module.average,
        lambda side, step: setattr(side.module, "average", 0.9**step),
    ),
    "a slot": (lambda self, x: x * self.slotted.n, lambda side, step: setattr(side.slotted, "n", step)),
    "a dataclass": (
        lambda self, x: x * (self.settings.rate if self.settings.rate < 40.5 else 2.0),
        lambda side, step: setattr(side.settings, "rate", float(step)),
    ),
    "a namespace through vars()": (
        lambda self, x: x * vars(self.box)["m"],
        lambda side, step: setattr(side.box, "n", step),
    ),
    "an entry": (lambda self, x: x * self.ordered["b"], lambda side, step: side.ordered.update(b=step * 0.5)),
    "an entry that is not read": (
        lambda self, x: x * self.ordered["b"],
        lambda side, step: side.ordered.update(a=step),
    ),
    "an item": (lambda self, x: x * self.items[2], lambda side, step: side.items.__setitem__(2, step / 3)),
    "two at different times": (
        lambda self, x: x * self.n + self.box.m,
        lambda side, step: setattr(*((side, "n") if step < 25 else (side.box, "m")), step),
    ),
    "beside a counter": (
        counts_and_scales,
        lambda side, step: setattr(side.box, "m", step * 0.5),
    ),
    "an error when it is zero": (
        lambda self, x: x / self.n if self.n else x,
        lambda side, step: setattr(side, "n", step % 3),
    ),
}


@pytest.mark.parametrize(("build", "move"), MOVED.values(), ids=MOVED.keys())
def test_numbers_moved_from_outside_cost_no_builds(
    build: Callable[..., Any], move: Callable[[Any, int], Any]
) -> None:
    assert len(compared(build, 50, move).builds) <= 3


def as_json(self: Any, x: torch.Tensor) -> Any:
    """C code that takes plain numbers alone, and a branch for all else."""
    try:
        return x * len(json.dumps(self.n))
    except TypeError:
        return x * -1.0


@pytest.mark.parametrize("build", [as_json, lambda self, x: x[:, self.n]], ids=["C code", "an index"])
def test_numbers_moved_from_outside_that_must_be_plain(build: Callable[..., Any]) -> None:
    compared(build, 12, lambda side, step: setattr(side, "n", step % 3))


def test_interpolations_of_omegaconf() -> None:
    """They are parsed anew in each step, by code that keeps automata and buffers."""
    omegaconf = pytest.importorskip("omegaconf")
    config = {
        "rate": 0.5,
        "twice": "${rate}",
        "deep": {"text": "n_${..steps}", "up": "${..rate}"},
        "steps": 3,
    }

    def scaled(self: Any, x: torch.Tensor) -> Any:
        return x * self.tree.twice + len(self.tree.deep.text) + self.tree.deep.up

    def move(side: Any, step: int) -> None:
        if step == 0:
            side.tree = omegaconf.OmegaConf.create(config)
        if step > 4:
            side.tree.rate = step * 0.5
        if step == 15:
            side.tree.steps = 12

    assert len(compared(scaled, 20, move).builds) <= 5


# --- where code demands a plain number: a build for each value, with eager's numbers ------------------------------------


def as_an_index(self: Any, x: torch.Tensor) -> Any:
    self.n = (self.n + 1) % 3
    return x[:, self.n]


def as_a_range(self: Any, x: torch.Tensor) -> Any:
    self.n = (self.n + 1) % 3
    for _ in range(self.n):
        x = x * 1.5
    return x


def as_a_text(self: Any, x: torch.Tensor) -> Any:
    self.n = (self.n + 1) % 3
    return x * len(f"{self.n * 37}") + float("%d" % self.n)  # noqa: UP031


def as_a_key(self: Any, x: torch.Tensor) -> Any:
    self.n = (self.n + 1) % 3
    return x * {0: 3.0, 1: 4.0, 2: 5.0}[self.n]


def as_a_tensor(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * torch.tensor(self.n) + torch.full((3,), float(self.n % 2)) + torch.tensor([self.n % 3, 1, 2])


def as_a_shape(self: Any, x: torch.Tensor) -> Any:
    self.n = (self.n + 1) % 3
    return x.new_zeros(self.n + 1, 3) + x[:1]


def by_its_type(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    kinds = {int: 1.0, float: 2.0}
    return x * kinds[type(self.n)] * (3.0 if isinstance(self.n, int) else 4.0)


def huge(self: Any, x: torch.Tensor) -> Any:
    self.n = self.n * 31 + 7
    return x * (self.n % 101)


def into_a_float(self: Any, x: torch.Tensor) -> Any:
    self.n = self.n / 2 if self.n > 3 else self.n + 1
    return x * self.n


def into_none(self: Any, x: torch.Tensor) -> Any:
    self.n = None if self.n == 3 else (self.n or 0) + 1
    return x * 2


def by_identity(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * (2.0 if self.n is True else 3.0)


def whole_dict(self: Any, x: torch.Tensor) -> Any:
    self.box.n += 1
    return x * sum(vars(self.box).values())


def unseen(self: Any, x: torch.Tensor) -> Any:
    n = object.__getattribute__(self, "n")
    object.__setattr__(self, "n", n + 1)
    return x * self.n


def written_by_divmod(self: Any, x: torch.Tensor) -> Any:
    self.n, rest = divmod(self.n + 3, 2)
    self.items[1] = rest
    return x * self.n + rest


def may_raise(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    self.box.m = 10 // (self.n - 100)
    return x * 2


@pytest.mark.parametrize(
    "build",
    [as_an_index, as_a_range, as_a_text, as_a_key, as_a_tensor, as_a_shape, by_its_type, huge, into_a_float, into_none,
     by_identity, whole_dict, unseen, written_by_divmod, may_raise],
    ids=lambda build: build.__name__,
)  # fmt: skip
def test_numbers_are_those_of_eager_mode(build: Callable[..., Any]) -> None:
    compared(build, 24)


def test_an_error_in_a_book_is_that_of_eager_mode() -> None:
    graph, _ = sides(may_raise)
    graph(X)
    graph.n = 99
    with pytest.raises(ZeroDivisionError):
        graph(X)
    assert graph.n == 99
    assert_same(X * 2, (setattr(graph, "n", 5), graph(X))[1])
    assert (graph.n, graph.box.m) == (6, 10 // -94)


# --- lists that only grow -------------------------------------------------------------------------------------------------


def append_a_constant(self: Any, x: torch.Tensor) -> Any:
    self.losses.append(3)
    return x * 2


def append_a_text(self: Any, x: torch.Tensor) -> Any:
    self.box.history.append("a step")
    return x * 2


def append_and_count(self: Any, x: torch.Tensor) -> Any:
    self.losses.append(1.5)
    return x * len(self.losses)


def append_a_counter(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    self.losses.append(self.n)
    return x * 2


def append_a_loss(self: Any, x: torch.Tensor) -> Any:
    loss = (x * 2).sum()
    self.losses.append(loss.detach())
    return loss


def fill_lists(side: Any) -> None:
    fill(side)
    side.losses, side.box.history = [], []


def grown(build: Callable[..., Any], between: Callable[[Any, int], None] = lambda _side, _step: None) -> Any:
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    fill_lists(graph)
    fill_lists(plain)
    for step in range(50):
        between(plain, step)
        between(graph, step)
        assert_same(plain.build(X + step), graph(X + step), f"step {step}")
        assert_same(plain.losses, graph.losses, f"step {step}")
        assert plain.box.history == graph.box.history
    return graph


@pytest.mark.parametrize(
    "build", [append_a_constant, append_a_text, append_a_counter, append_a_loss], ids=lambda b: b.__name__
)
def test_lists_that_only_grow_cost_no_builds(build: Callable[..., Any]) -> None:
    graph = grown(build)
    assert len(graph.builds) <= 2, [item.reason for item in graph.builds]


def cleared(side: Any, step: int) -> None:
    if step % 10 == 5:
        side.losses.clear()
    if step == 25:
        side.losses = [1, 2]
    if step == 35:
        side.losses.insert(0, "x")


@pytest.mark.parametrize(
    "build", [append_a_constant, append_a_counter, append_a_loss], ids=lambda b: b.__name__
)
def test_lists_changed_from_outside_are_seen(build: Callable[..., Any]) -> None:
    assert len(grown(build, cleared).builds) <= 3


def meters(build: Callable[..., Any], between: Callable[[Any, int], None] = lambda _side, _step: None) -> Any:
    """Steps with a dict of lists, which is there at first in part. Gives the graph."""
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    for side in (graph, plain):
        side.meter, side.n = defaultdict(list, {"old": [1.0]}), 0
    for step in range(30):
        between(plain, step)
        between(graph, step)
        assert_same(plain.build(X + step), graph(X + step), f"step {step}")
        assert repr(plain.meter) == repr(graph.meter), f"step {step}"
    return graph


def meter_of_losses(self: Any, x: torch.Tensor) -> Any:
    loss = (x * 2).sum()
    self.meter["loss"].append(loss.item())
    self.meter["old"].append(1.5)
    return loss


def meter_by_name(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    for name in ("old", "new"):
        self.meter[name].append(self.n)
    return x * 2


def meter_that_is_read(self: Any, x: torch.Tensor) -> Any:
    self.meter["old"].append(2.0)
    return x * sum(map(len, self.meter.values()))


def meter_that_is_read_by_key(self: Any, x: torch.Tensor) -> Any:
    self.meter["old"].append(2.0)
    return x * len(self.meter["old"])


def meter_under_another_name(self: Any, x: torch.Tensor) -> Any:
    self.meter["old"].append(2.0)
    return x * len(getattr(self, "met" + "er")["old"])


def meters_changed(side: Any, step: int) -> None:
    if step == 10:
        side.meter["loss"].clear()
    if step == 15:
        side.meter.pop("old", None)
    if step == 20:
        side.meter = defaultdict(list, {"old": [3.0], "loss": [1]})


@pytest.mark.parametrize("build", [meter_of_losses, meter_by_name], ids=lambda b: b.__name__)
def test_meters_cost_no_builds(build: Callable[..., Any]) -> None:
    assert len(meters(build).builds) <= 2
    meters(build, meters_changed)


@pytest.mark.parametrize(
    "build",
    [meter_that_is_read, meter_that_is_read_by_key, meter_under_another_name],
    ids=lambda b: b.__name__,
)
def test_meters_that_are_read_are_facts(build: Callable[..., Any]) -> None:
    meters(build)
    meters(build, meters_changed)


def test_a_list_that_is_read_is_a_fact() -> None:
    graph, plain = (
        type("Step", (mg.Graph,), {"build": append_and_count})(),
        type("P", (), {"build": append_and_count})(),
    )
    fill_lists(graph)
    fill_lists(plain)
    for _ in range(4):
        assert_same(plain.build(X), graph(X))


# --- beside other threads, and in the loops of others ---------------------------------------------------------------------


@pytest.mark.parametrize("build", [on_the_graph, in_a_module, every_tenth], ids=lambda build: build.__name__)
def test_counters_beside_another_thread(build: Callable[..., Any]) -> None:
    done = threading.Event()
    seen: list[type] = []
    graph, plain = sides(build)

    def watch() -> None:
        while not done.wait(0.0005):
            seen.extend({type(vars(graph)["n"]), type(vars(graph.module)["calls"])} - {int})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for step in range(20):
            assert_same(plain.build(X + step), graph(X + step))
            assert repr(books(graph)) == repr(books(plain))
    finally:
        done.set()
        thread.join()
    assert len(graph.builds) <= 2
    assert not seen


class Trained(nn.Module):
    """What both sides of a loop train: it counts, and keeps a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 1), nn.Dropout(0.25)
        self.num_calls, self.tokens, self.seen_steps = 0, {"n": 0}, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.tokens["n"] += x.shape[0]
        self.seen_steps.append(self.num_calls)
        return self.layer(self.dropout(x)) * (1.0 + 1.0 / self.num_calls)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_training_loop_that_counts(backend: str) -> None:
    def train(graphed: bool) -> Any:
        torch.manual_seed(0)
        model = Trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        class Step(mg.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.add_optimizer(optimizer)
                self.config.backend(backend)

            def build(self, x: torch.Tensor) -> torch.Tensor:
                loss = loss_of(x)
                loss.backward()
                return loss.detach()

        step = Step() if graphed else None
        losses = []
        for index in range(50 if backend == "aten" else 6):
            x = X + index / 10
            if step is not None:
                losses.append(step(x))
                continue
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if step is not None:
            assert len(step.builds) <= 2, [item.reason for item in step.builds]
        return losses, model.state_dict(), model.num_calls, model.tokens, model.seen_steps

    expected, got = train(False), train(True)
    assert expected[2:] == got[2:]
    if backend == "aten":
        assert_same(expected[:2], got[:2])
    else:
        torch.testing.assert_close(expected[0], got[0])


def test_in_the_loop_of_lightning() -> None:
    importlib.import_module("tests.torchvision_ops")
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, graphed: bool) -> None:
            super().__init__()
            self.net, self.automatic_optimization = Trained(), False
            self.graphed, self.seen, self.losses = graphed, 0, []

        def loss_of(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.net(x).square().mean() * (1.0 + self.global_step)

        def training_step(self, batch: Any, _index: int) -> None:
            (x,) = batch
            optimizer = self.optimizers(use_pl_optimizer=False)
            if self.graphed:
                if "graph" not in self.__dict__:
                    self.__dict__["graph"] = _graph_of(self, optimizer)
                loss = self.__dict__["graph"](x)
            else:
                optimizer.zero_grad()
                loss = self.loss_of(x)
                loss.backward()
                optimizer.step()
            self.log("loss", loss)
            self.losses.append(loss.detach().clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(graphed: bool) -> Any:
        torch.manual_seed(0)
        module = Module(graphed)
        data = torch.utils.data.TensorDataset(torch.randn(100, 3))
        options = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **options)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        return module

    expected, got = fit(False), fit(True)
    assert_same(expected.losses, got.losses)
    assert_same(expected.state_dict(), got.state_dict())
    assert (expected.seen, expected.net.tokens) == (got.seen, got.net.tokens) == (50, {"n": 200})
    builds = got.__dict__["graph"].builds
    assert len(builds) <= 2, [item.reason for item in builds]


def _gpt2() -> Any:
    importlib.import_module("tests.torchvision_ops")
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, attn_pdrop=0.0)

    class Counting(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(config)
            self.num_calls, self.tokens, self.seen_steps = 0, {"n": 0}, []

        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            self.num_calls += 1
            self.tokens["n"] += input_ids.numel()
            self.seen_steps.append(self.num_calls)
            return super().forward(input_ids=input_ids, labels=labels, **options)

        def loss_of(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self(input_ids=x, labels=x).loss
            return loss

    torch.manual_seed(0)
    return Counting()


def test_a_model_of_transformers_in_a_loop() -> None:
    def train(graphed: bool) -> Any:
        model = _gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        graph = _graph_of(model, optimizer) if graphed else None
        losses = []
        for _ in range(50):
            x = torch.randint(0, 50, (2, 8))
            if graph is None:
                optimizer.zero_grad()
                loss = model.loss_of(x)
                loss.backward()
                optimizer.step()
            losses.append(graph(x) if graph is not None else loss.detach())
        assert graph is None or len(graph.builds) <= 2, [item.reason for item in graph.builds]
        return losses, model.state_dict(), model.num_calls, model.tokens, model.seen_steps

    assert_same(train(False), train(True))


def test_in_the_loop_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = _gpt2()
    transformers = importlib.import_module("transformers")
    graphs: list[mg.Graph] = []

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.config.keep_gradients(True)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model.loss_of(x)
            loss.backward()
            return loss.detach()

    class Loop(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            if not graphs:
                graphs.append(Step())
            return graphs[0](inputs["input_ids"])

    rows = [{"input_ids": torch.randint(0, 50, (8,))} for _ in range(100)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=50, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True,
    )  # fmt: skip
    Loop(model=model, args=arguments, train_dataset=rows).train()
    assert (model.num_calls, model.tokens) == (50, {"n": 800})
    assert len(graphs[0].builds) <= 2, [item.reason for item in graphs[0].builds]


def _graph_of(module: Any, optimizer: Any) -> mg.Graph:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.module.loss_of(x)
            loss.backward()
            return loss.detach()

    return Step()


# --- attributes that are made in the first step --------------------------------------------------------------------------


class Table:
    def __init__(self) -> None:
        self.factor = 2.0


def other_branch_first(self: Any, x: torch.Tensor) -> Any:
    if not hasattr(self, "made"):
        self.made = 3.0
        return x * 100
    return x * self.made


def other_branch_with_an_object(self: Any, x: torch.Tensor) -> Any:
    if getattr(self, "made", None) is None:
        self.made = Table()
        return x * 100
    return x * self.made.factor


def other_branch_of_a_property(self: Any, x: torch.Tensor) -> Any:
    return x * self.cached.scale * self.cached.made


@pytest.mark.parametrize(
    "build",
    [other_branch_first, other_branch_with_an_object, other_branch_of_a_property],
    ids=lambda build: build.__name__,
)
def test_the_step_after_the_first_finds_what_it_made(build: Callable[..., Any]) -> None:
    graph, plain = sides(build)
    for _ in range(5):
        assert_same(plain.build(X), graph(X))
    assert len(graph.builds) == 2


# --- everything that code does with a number --------------------------------------------------------------------------------

USES = """
x * sum(self.d.values()) | x * len(json.dumps(self.d)) | x * len(repr(self.d)) | x * tuple(self.d.items())[0][1]
x * float(self.d == {"a": 3}) | x * copy.deepcopy(self.d)["a"] | x * len(str(self.box)) | x * copy.copy(self.box).n
x * len(pickle.dumps(self.d)) | x[0] * torch.tensor(list(self.d.values())) | x[0] * np.array(list(self.d.values())).sum()
x * len("%s" % (self.n * 40,)) | x * (hash((self.n, 1)) % 101) | x * list({self.n: 1})[0] | x * sorted([self.n, 3])[0]
x * float(self.n in [1, 2]) | x * [1, 2, 3, 4, 5, 6].index(self.n) | x * len([0] * self.n) | x * len("a" * self.n)
x * len(bytes(self.n)) | x[self.n % 2] | x.roll(self.n) | x.view(-1)[self.n % 6] | torch.arange(self.n) | x.sum(self.n % 2)
x.clamp(max=self.n / 4) | x**self.n | torch.pow(self.n, x) | x.add(x, alpha=self.n) | torch.where(x > 0, self.n, 0.5)
torch.full_like(x, self.n) | x.clone().fill_(self.n) | x * np.float32(self.n) | x * math.sqrt(self.n) | x * math.gcd(self.n, 4)
x * self.n.bit_length() | x * float(isinstance(self.n, numbers.Integral)) | x * operator.index(self.n) | x * round(self.n / 3, 1)
x * abs(complex(self.n, 1)) | x * float(fractions.Fraction(self.n, 3)) | x * float(decimal.Decimal(self.n))
x * datetime.timedelta(seconds=self.n).total_seconds() | x * next(enumerate([1], start=self.n))[0]
x * struct.pack("i", self.n)[0] | x * float(self.n is None) | x * float(hasattr(self.n, "__dict__")) | x * (type(self.n)() + 2) | x * max(self.n, 2) | x * min(self.n, 2.5)
x * (self.n & 1) | x * ~self.n | x * (self.n << 2) | x * random.Random(self.n).random() | x * np.random.default_rng(self.n).random()
x * np.random.RandomState(self.n).rand() | x * divmod(self.n, 3)[1] | x * (self.n // 2 - -self.n // 2) | x * (self.n % -4) | -x * -self.n
x * (2**self.n) | x * 2 ** (-self.n) | x * (self.n**0.5) | x * math.floor(self.n / 2) | x * int(self.n / 2) | x * float(self.n)
x * bool(self.n - 3) | x * (not self.n - 3) | x * (self.n > 2 and self.n) | x * (1 if self.n == 3.0 else 2) | x * sum([self.n, 1, 0.5])
x * math.exp(-self.n) | x * math.fsum([self.n, 0.1]) | x * math.factorial(self.n) | x * statistics.mean([self.n, 4]) | x * (self.n - 0.1 - self.n)
x * torch.tensor(self.n) | x * torch.tensor(float(self.n)) | x * torch.tensor([self.n, 1, 2]) | x * torch.as_tensor(self.n) | x.new_tensor(self.n)
x * torch.scalar_tensor(self.n) | torch.linspace(0, self.n, 3) | x.repeat(self.n, 1) | x.reshape(-1)[: self.n] | x.unfold(1, 1 + self.n % 3, 1)
nn.functional.dropout(x, 0.1 * self.n) | nn.functional.leaky_relu(x, 0.1 * self.n) | x.lerp(x * 2, self.n / 10) | x.to(torch.int64) // self.n
x.to(torch.int64) * self.n | x > self.n / 8 | x.softmax(self.n % 2) | torch.addcmul(x, x, x, value=self.n) | x * np.sin(self.n) | x / self.n
(x * 4).floor_divide(self.n) | x.remainder(self.n) | x == self.n | x * len(f"{self.n:05d}") | x * len(f"{self.n!r}{self.n * 9}") | x * len(str(self.n * 9))
x * int(f"{self.n}") | x * {1: 5, 2: 6}.get(self.n, 7) | x * (lambda *a: len(a))(*range(self.n)) | x * np.array([1, 2, 3, 4])[self.n % 4]
x * np.arange(8)[: self.n].sum() | x * as_if(self.n) | x * sum(1 for _ in zip(range(self.n), "abcd")) | x * matched(self.n) | x * array.array("i", [self.n])[0]
x * functools.reduce(operator.mul, range(1, self.n + 1)) | x * tried(self.n) | x * cached(self.n) | x * self.n.real | x * self.n.__add__(2) | x * int.__add__(self.n, 2)
"""


def as_if(n: int) -> int:
    return int("12345678"[n])


def matched(n: int) -> int:
    match n:
        case 1 | 2:
            return 5
        case int():
            return n * 2
    return 0


def tried(n: int) -> int:
    try:
        return [1, 2, 3][n]
    except IndexError:
        return 9


@functools.cache
def cached(n: int) -> int:
    return n * 3


@pytest.mark.parametrize(
    "use", [use.strip() for line in USES.strip().split("\n") for use in line.split(" | ")]
)
def test_all_that_code_does_with_a_counter(use: str) -> None:
    modules = [
        "array",
        "copy",
        "datetime",
        "decimal",
        "fractions",
        "json",
        "numbers",
        "operator",
        "pickle",
        "random",
        "statistics",
        "struct",
    ]
    names: dict[str, Any] = globals() | {name: importlib.import_module(name) for name in modules}
    names["np"] = np
    text = f"def build(self, x):\n    self.n += 1\n    self.d['a'] += 1\n    self.box.n = self.n\n    return {use}\n"
    exec(text, names)
    graph, plain = sides(names["build"])
    for side in (graph, plain):
        side.d = {"a": 0}
    for step in range(5):
        torch.manual_seed(step)
        expected = plain.build(X)
        torch.manual_seed(step)
        assert_same(expected, graph(X), f"step {step}")
        assert repr((plain.n, plain.d, plain.box)) == repr((graph.n, graph.d, graph.box))


READS = """
len(self.losses) | sum(self.losses) | float(bool(self.losses)) | getattr(self, "losses")[-1] | vars(self)["losses"][-1] | other(self)
len(list(iter(self.losses))) | (lambda xs: xs[-1])(self.losses) | sum(x for x in self.losses) | len([*self.losses]) | self.losses.count(2.0)
operator.attrgetter("losses")(self)[-1] | len(getattr(self, "los" + "ses")) | self.alias[-1] | len(self.held[0]) | len("{0.losses}".format(self))
len(copy.copy(self.losses)) | float(self.losses == [2.0]) | len(repr(self.losses)) | self.last() | next(reversed(self.losses)) | self.method(3.0) or len(self.alias)
sum(map(len, [v for v in vars(self).values() if type(v) is list])) | self.losses.pop() | (self.losses.sort() or self.losses[0]) | len(self.losses.__add__([1]))
"""


def other(owner: Any) -> float:
    log = owner.losses
    return float(log[-1])


@pytest.mark.parametrize(
    "read", [read.strip() for line in READS.strip().split("\n") for read in line.split(" | ")]
)
def test_a_list_that_is_read_in_any_way_is_a_fact(read: str) -> None:
    names: dict[str, Any] = globals() | {name: importlib.import_module(name) for name in ("copy", "operator")}
    exec(f"def build(self, x):\n    self.losses.append(2.0)\n    return x * ({read})\n", names)
    graph, plain = sides(names["build"])
    for side in (graph, plain):
        log: list[float] = []
        side.losses = side.alias = log
        side.held, side.method, side.last = (log, 1), log.append, log.__len__
    for step in range(5):
        assert_same(plain.build(X), graph(X), f"step {step}")
        assert plain.losses == graph.losses
        plain.losses.append(step)
        graph.losses.append(step)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_numbers_beyond_the_bits_of_compiled_code(backend: str) -> None:
    def build(self: Any, x: torch.Tensor) -> Any:
        self.n += 1
        self.average = self.average * 1.5 - self.n
        return x * self.average + (self.n * self.n % 7)

    graph, plain = sides(build)
    graph.config.backend(backend)
    graph.average = plain.average = 1.0
    changes = {2: 2**40, 4: 2**70, 6: 5}
    for step in range(8):
        if step in changes:
            graph.n = plain.n = changes[step]
        torch.testing.assert_close(plain.build(X), graph(X), rtol=1e-6, atol=0.0)
        assert repr((graph.n, graph.average)) == repr((plain.n, plain.average))


# --- numbers read out of tensors ---------------------------------------------------------------------------------------


class Reader:
    """Keeps what it reads out of its argument."""

    def __init__(self) -> None:
        self.total, self.last, self.positive, self.seen = 0.0, 0.0, 0, []

    def read(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.sum().item()
        self.last = x.max().item()
        self.positive += int((x > 0).sum())
        self.seen.append(x.min().item())
        return x * 2


def test_numbers_read_out_of_arguments_are_kept() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.reader.read(x)

    graph, plain = Step(), Reader()
    for index in range(4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        assert torch.equal(plain.read(x), graph(x))
        assert vars(plain) == vars(graph.reader)
    assert len(graph.builds) <= 2


def test_a_sum_of_tensors_in_a_buffer() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)
            self.model.register_buffer("total", torch.zeros(()))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).sum()
            self.model.total.add_(loss.detach())
            return loss

    graph = Step()
    expected = torch.zeros(())
    for _ in range(5):
        expected = expected + graph.model(torch.ones(1, 2)).sum().detach()
        graph(torch.ones(1, 2))
        assert torch.equal(expected, graph.model.total)
    assert len(graph.builds) == 1


# --- objects that a step makes and forgets -----------------------------------------------------------------------------


class Aliased:
    """Looks up its attributes under other names, as configurations of libraries do."""

    aliases = {"width": "d_model"}  # noqa: RUF012

    def __init__(self) -> None:
        self.d_model, self.decoder_layers, self.names = 3, 2, {0: "zero"}

    def __getattribute__(self, name: str) -> Any:
        if name != "aliases" and name in super().__getattribute__("aliases"):
            name = super().__getattribute__("aliases")[name]
        return super().__getattribute__(name)

    def of_decoder(self) -> Any:
        made = copy.deepcopy(self)
        for name in list(vars(made)):
            if name.startswith("decoder_"):
                setattr(made, name.removeprefix("decoder_"), getattr(made, name))
                delattr(made, name)
        made.names[1] = "one"
        return made


def copied_settings(self: Any, x: torch.Tensor) -> Any:
    return x * self.aliased.of_decoder().layers * len(self.aliased.names)


def kept_settings(self: Any, x: torch.Tensor) -> Any:
    found = x * self.aliased.width
    self.aliased = self.aliased.of_decoder()
    self.aliased.d_model += 1
    self.aliased.decoder_layers = 2
    return found


def test_a_copy_that_a_step_makes_and_forgets_costs_no_build() -> None:
    graph, plain = sides(copied_settings)
    graph.aliased, plain.aliased = Aliased(), Aliased()
    for step in range(6):
        if step == 3:
            graph.aliased.decoder_layers = plain.aliased.decoder_layers = 5
        assert_same(plain.build(X), graph(X), f"step {step}")
    assert len(graph.builds) == 2, [build.reason for build in graph.builds]


def test_a_copy_that_a_step_makes_and_keeps_is_eagers() -> None:
    graph, plain = sides(kept_settings)
    graph.aliased, plain.aliased = Aliased(), Aliased()
    for step in range(3):
        assert_same(plain.build(X), graph(X), f"step {step}")
        assert vars(plain.aliased) == vars(graph.aliased)


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """What models of other libraries give: a dict that is filled from its fields, whose names are computed."""

    sample: Any = None
    other: Any = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                self[item.name] = value


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return Output(sample=Output(sample=self.linear(x)).sample)


def test_outputs_that_a_step_makes_are_no_places_outside() -> None:
    decoder = Decoder()
    graph = mg.trace(lambda x: decoder(x).sample.sum())
    for factor in (1.0, 2.0, 3.0):
        x = torch.full((2, 3), factor)
        assert torch.equal(graph(x), decoder(x).sample.sum())
    assert len(graph.builds) == 1


class Seen(abc.ABC):  # noqa: B024 -- nothing has to be written for it
    """An abstract class, which keeps what it was asked about."""

    level = 2.0


def test_what_abstract_classes_remember_is_no_fact() -> None:
    whole = ClassEntries("Seen", class_table(Seen), set(), cls=Seen, whole=True)
    assert "level" in whole.now()
    assert "_abc_impl" not in whole.now()


def test_what_copies_leave_on_classes_is_no_fact() -> None:
    """Pickling and copying write `__slotnames__` into the class of whatever they meet for the first time."""

    class Scale:
        factor = 2.0

    class Net(nn.Linear):
        scale = Scale()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale.factor

    class Own(torch.optim.SGD):
        pass

    model = Net(3, 2)
    step = mg.train_graph(model, nn.MSELoss(), Own(model.parameters(), lr=0.1, momentum=0.9))
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    for _ in range(3):
        step(x, y)
        copy.deepcopy((model, Scale()))
        copy.deepcopy(Own(model.parameters(), lr=0.1))
    assert "__slotnames__" in vars(Scale)
    assert len(step.builds) == 1
    Scale.factor = 3.0
    step(x, y)
    assert len(step.builds) == 2
