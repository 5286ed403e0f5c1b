"""A step that fills lists and meters: the books of eager mode, and hardly more than one build."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monograph as mg
from tests.capture.numbers.books import (
    X,
    _outside_as_before,  # noqa: F401
    fill,
)
from tests.support import assert_same


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


def append_a_tuple(self: Any, x: torch.Tensor) -> Any:
    loss = (x * 2).sum()
    self.losses.append((loss.item(), "loss", loss.item() * 2))
    return loss


def append_dicts_and_lists(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    self.losses.extend([{"loss": x.sum().item(), "at": [self.n, (x.max().item(),)]}, 3])
    return x * 2


def append_one_list_twice(self: Any, x: torch.Tensor) -> Any:
    row = [x.sum().item()]
    self.losses.extend([row, row])
    return x * 2


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


@pytest.mark.every_case
@pytest.mark.parametrize(
    "build",
    [
        append_a_constant,
        append_a_text,
        append_a_counter,
        append_a_loss,
        append_a_tuple,
        append_dicts_and_lists,
    ],
    ids=lambda b: b.__name__,
)
def test_lists_that_only_grow_cost_no_builds(build: Callable[..., Any]) -> None:
    graph = grown(build)
    assert len(graph.builds) <= 2, [item.reason for item in graph.builds]


def test_one_object_at_two_places_is_refused() -> None:
    with pytest.raises(mg.CaptureError, match="no replay can repeat"):
        grown(append_one_list_twice)


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


def meter_that_makes_its_lists(self: Any, x: torch.Tensor) -> Any:
    loss = (x * 2).sum()
    self.meter.setdefault("loss", []).append(loss.item())
    for name in ("old", "new"):
        self.meter.setdefault(name, []).extend([loss.detach(), 2])
    return loss


def meter_that_reads_its_lists(self: Any, x: torch.Tensor) -> Any:
    return x * len(self.meter.setdefault("old", []) + [self.meter.setdefault("new", []).append(1)])


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


@pytest.mark.parametrize(
    "build", [meter_of_losses, meter_that_makes_its_lists, meter_by_name], ids=lambda b: b.__name__
)
def test_meters_cost_no_builds(build: Callable[..., Any]) -> None:
    assert len(meters(build).builds) <= 2
    meters(build, meters_changed)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "build",
    [
        meter_that_reads_its_lists,
        meter_that_is_read,
        meter_that_is_read_by_key,
        meter_under_another_name,
    ],
    ids=lambda b: b.__name__,
)
def test_meters_that_are_read_are_facts(build: Callable[..., Any]) -> None:
    meters(build)
    meters(build, meters_changed)


def stats(self: Any, x: torch.Tensor) -> Any:
    loss = (x * 2).sum()
    self.stats["steps"] += 1
    found = self.stats
    found["last"] = loss.item()
    found["losses"].append(loss.item())
    return loss + self.stats["steps"]


def stats_that_are_read(self: Any, x: torch.Tensor) -> Any:
    self.stats["steps"] += 1
    self.stats["losses"].append(2.0)
    return x * len(self.stats["losses"])


def stats_under_a_name(self: Any, x: torch.Tensor) -> Any:
    key = "losses" if self.stats["steps"] == 0 else "last"
    self.stats["steps"] += 1
    self.stats["losses"].append(2.0)
    return x * len(str(self.stats[key]))


def stats_changed(side: Any, step: int) -> None:
    if step == 4:
        side.stats["losses"].clear()
    if step == 6:
        side.stats["steps"] = 0
    if step == 8:
        side.stats = {"steps": 0, "last": 0.0, "losses": [1.5]}


@pytest.mark.parametrize(
    ("build", "most"),
    [(stats, 2), (stats_that_are_read, 30), (stats_under_a_name, 30)],
    ids=lambda b: getattr(b, "__name__", ""),
)
@pytest.mark.parametrize("between", [lambda _side, _step: None, stats_changed], ids=["", "changed"])
def test_dicts_with_lists_and_numbers(
    build: Callable[..., Any], most: int, between: Callable[[Any, int], None]
) -> None:
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    for side in (graph, plain):
        side.stats = {"losses": [], "steps": 0, "last": 0.0}
    for step in range(12):
        between(plain, step)
        between(graph, step)
        assert_same(plain.build(X + step), graph(X + step), f"step {step}")
        assert repr(plain.stats) == repr(graph.stats), f"step {step}"
    assert len(graph.builds) <= most, graph.explain()


def test_what_was_taken_out_of_a_list_is_nobodys() -> None:
    graph = type("Step", (mg.Graph,), {"build": append_a_loss})()
    fill_lists(graph)
    for _ in range(3):
        graph(X)
        loss = weakref.ref(graph.losses.pop())
        assert loss() is None, "the graph keeps it"


def test_a_list_that_is_read_is_a_fact() -> None:
    graph, plain = (
        type("Step", (mg.Graph,), {"build": append_and_count})(),
        type("P", (), {"build": append_and_count})(),
    )
    fill_lists(graph)
    fill_lists(plain)
    for _ in range(4):
        assert_same(plain.build(X), graph(X))
