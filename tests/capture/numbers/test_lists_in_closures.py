"""Steps that fill lists in variables of closures: the lists of eager mode, and hardly more than one build."""

from __future__ import annotations

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
