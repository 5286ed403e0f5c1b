"""Steps that fill lists in variables of closures: the lists of eager mode, and hardly more than one build."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monograph as mg
from tests.capture.numbers.books import X
from tests.support import assert_same

Build = Callable[[Any, torch.Tensor], Any]
Made = tuple[Build, Any]  # and what it fills


def a_number() -> Made:
    kept: list[Any] = []

    def build(_self: Any, x: torch.Tensor) -> Any:
        kept.append((x * 2).sum().item())
        return x * 2

    return build, kept


def tuples_and_dicts() -> Made:
    kept: list[Any] = []

    def build(_self: Any, x: torch.Tensor) -> Any:
        loss = (x * 2).sum()
        kept.append({"loss": loss.item(), "n": 2})
        kept.extend([(1, loss.item()), "a step"])
        return loss

    return build, kept


def dicts_of_tensors() -> Made:
    kept: list[Any] = []

    def build(_self: Any, x: torch.Tensor) -> Any:
        loss = (x * 2).sum()
        kept.append({"loss": loss.detach()})
        return loss

    return build, kept


def by_functions() -> Made:
    kept: list[Any] = []

    def keep(value: Any) -> None:
        kept.append(value)

    def build(_self: Any, x: torch.Tensor) -> Any:
        keep(x.sum().item())
        (lambda value: kept.append((value, 3)))(x.max().item())
        return x * 2

    return build, kept


def a_dict_of_lists() -> Made:
    kept: dict[str, list[Any]] = {"loss": [], "other": []}

    def build(_self: Any, x: torch.Tensor) -> Any:
        kept["loss"].append(x.sum().item())
        kept["other"].append(x.max().item())
        return x * 2

    return build, kept


def a_list_that_is_read() -> Made:
    kept: list[Any] = []

    def build(_self: Any, x: torch.Tensor) -> Any:
        kept.append(1.5)
        return x * len(kept)

    return build, kept


def a_list_that_is_read_elsewhere() -> Made:
    kept: list[Any] = []

    def count() -> int:
        return len(kept)

    def build(_self: Any, x: torch.Tensor) -> Any:
        kept.append("a step")
        return x * count()

    return build, kept


def a_list_in_a_cell() -> Made:
    kept: list[Any] = []

    def add() -> None:
        kept.append("a step")

    def build(_self: Any, x: torch.Tensor) -> Any:
        add()
        assert add.__closure__ is not None
        return x * len(add.__closure__[0].cell_contents)

    return build, kept


def a_list_among_locals() -> Made:
    kept: list[Any] = []

    def build(_self: Any, x: torch.Tensor) -> Any:
        kept.append("a step")
        return x * len(locals()["kept"])

    return build, kept


def a_new_list() -> Made:
    kept: list[Any] = []

    def build(_self: Any, x: torch.Tensor) -> Any:
        nonlocal kept
        kept.append("a step")
        if len(kept) > 3:
            kept = []
        return x * 2

    return build, lambda: kept


def shown(kept: Any) -> str:
    return repr(kept() if callable(kept) else kept)


def filled(make: Callable[[], Made], between: Callable[[Any], None] = lambda _kept: None) -> Any:
    """Eight steps beside eager mode. Gives the graph."""
    (build, kept), (eager, expected) = make(), make()
    graph = type("Step", (mg.Graph,), {"build": build})()
    for step in range(8):
        assert_same(eager(None, X + step), graph(X + step), f"step {step}")
        assert shown(kept) == shown(expected), f"step {step}"
        between(kept)
        between(expected)
    return graph


@pytest.mark.parametrize(
    "make",
    [a_number, tuples_and_dicts, dicts_of_tensors, by_functions, a_dict_of_lists],
    ids=lambda make: make.__name__,
)
def test_lists_that_only_grow_cost_no_builds(make: Callable[[], Made]) -> None:
    graph = filled(make)
    assert len(graph.builds) == 1, [item.reason for item in graph.builds]


def test_lists_changed_from_outside_are_seen() -> None:
    assert len(filled(tuples_and_dicts, lambda kept: kept.clear()).builds) == 1


@pytest.mark.parametrize(
    "make",
    [
        a_list_that_is_read,
        a_list_that_is_read_elsewhere,
        a_list_in_a_cell,
        a_list_among_locals,
        a_new_list,
    ],
    ids=lambda make: make.__name__,
)
def test_lists_that_are_read_are_facts(make: Callable[[], Made]) -> None:
    assert len(filled(make).builds) > 3


def cut(self: Any, x: torch.Tensor) -> None:
    self.last.append(x.sum().item())
    self.last = self.last[-3:]


def cut_in_place(self: Any, x: torch.Tensor) -> None:
    self.last.append(x.sum().item())
    del self.last[:-3]


def joined(self: Any, x: torch.Tensor) -> None:
    self.last = (self.last + [x.sum().item()])[-3:]


def moved_in_place(self: Any, x: torch.Tensor) -> None:
    self.last.append(x.sum().item())
    del self.last[0]


def keeper(keep: Callable[[Any, torch.Tensor], None], last: Any) -> Any:
    def build(self: Any, x: torch.Tensor) -> Any:
        keep(self, x)
        return x * 2

    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    graph.last, plain.last = copy.copy(last), copy.copy(last)
    return graph, plain


@pytest.mark.parametrize(
    ("keep", "last"),
    [
        (cut, []),
        (cut_in_place, []),
        (joined, []),
        (lambda self, x: self.last.append(x.sum().item()), deque(maxlen=3)),
        (lambda self, x: self.last.add(x.sum().item()), set()),
    ],
    ids=["cut", "cut in place", "joined", "deque", "set"],
)
def test_the_last_numbers_are_refused_with_a_way(
    keep: Callable[[Any, torch.Tensor], None], last: Any
) -> None:
    graph, _ = keeper(keep, last)
    with pytest.raises(
        mg.CaptureError, match=r"puts numbers that it reads out of tensors .* into (graph\.)?last"
    ) as error:
        graph(X)
    assert "numbers.append(new); del numbers[0]" in str(error.value)
    assert graph.last == last


def test_a_list_of_fixed_length_that_is_moved_in_place() -> None:
    graph, plain = keeper(moved_in_place, [0.0] * 3)
    for step in range(8):
        assert_same(plain.build(X + step), graph(X + step), f"step {step}")
        assert graph.last == plain.last
    assert len(graph.builds) <= 2  # all of it moves, once any of it does


def test_a_list_in_a_closure_that_takes_a_number_and_is_read_is_refused() -> None:
    kept: list[Any] = []

    def build(_self: Any, x: torch.Tensor) -> Any:
        kept.append(x.sum().item())
        return x * len(kept)

    with pytest.raises(mg.CaptureError, match=r"puts numbers that it reads .*kept\[0\]"):
        type("Step", (mg.Graph,), {"build": build})()(X)
    assert not kept
