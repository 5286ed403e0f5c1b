"""A step that keeps counters and books: the numbers and the books of eager mode, and hardly more than one build."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.capture.numbers.books import (
    TOTAL,
    Config,
    Counts,
    Slotted,
    X,
    _outside_as_before,  # noqa: F401
    books,
    every_tenth,
    in_a_global,
    in_a_module,
    on_the_graph,
    outside,
    put_outside,
    sides,
)
from tests.support import assert_same

LOGGER = logging.getLogger("tests.no_storms")
LOGGER.addHandler(logging.NullHandler())


def used_in_the_step(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * self.n + 0.5**self.n


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


@pytest.mark.every_case
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


@pytest.mark.one_case
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


# --- numbers that the training script moves -----------------------------------------------------------------


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


@pytest.mark.long
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


# --- where code demands a plain number: a build for each value, with eager's numbers ------------------------


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


@pytest.mark.one_case
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


# --- attributes that are made in the first step -------------------------------------------------------------


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
