"""Whose memory a value of a recorded graph shows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from monograph.ir import memory
from monograph.ir.memory import MemoryRoots, base_of, changed_by, memory_root, views_its_input, written_by

aten = torch.ops.aten


def recorded(write: Callable[[fx.Graph, fx.Node], fx.Node]) -> tuple[fx.Node, fx.Node]:
    """An input of a graph, and what is written of it."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    return given, write(graph, given)


def op(target: Any, *args: Any) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda graph, given: graph.call_function(target, (given, *args))


@pytest.mark.parametrize(
    "write",
    [op(aten.t.default), op(aten.add_.Tensor, 1), op(aten.select.int, 0, 0)],
    ids=["t", "add_", "select"],
)
def test_views_and_ops_in_place_show_what_they_are_given(write: Any) -> None:
    given, made = recorded(write)
    assert base_of(made) is memory_root(made) is given


def test_one_of_several_views_shows_what_they_are_of() -> None:
    def write(graph: fx.Graph, given: fx.Node) -> fx.Node:
        return graph.call_function(operator.getitem, (graph.call_function(aten.split.Tensor, (given, 1)), 0))

    given, made = recorded(write)
    assert memory_root(made) is given


def test_a_new_tensor_shows_itself() -> None:
    _, made = recorded(op(aten.add.Tensor, 1))
    assert base_of(made) is None
    assert not views_its_input(made)


def test_each_step_of_a_chain_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    made = [graph.placeholder("x"), graph.placeholder("y")]
    for number in range(300):
        source = made[-1 - number % 3 % 2]
        target, *rest = [(aten.t.default,), (aten.add_.Tensor, 1), (aten.mul.Tensor, 2)][min(number % 7, 2)]
        made.append(graph.call_function(target, (source, *rest)))
    for number in range(300):
        made.append(graph.call_function(aten.add_.Tensor, (made[-1], number)))
    wanted = [memory_root(node) for node in made]
    steps = list[fx.Node]()
    monkeypatch.setattr(memory, "base_of", lambda node: (steps.append(node), base_of(node))[1])
    roots = MemoryRoots()
    assert [roots.of(node) for node in reversed(made)] == list(reversed(wanted))
    assert [roots.of(node) for node in made] == wanted
    assert len(set(wanted)) > 100
    assert len(steps) == len(set(steps)) == len(made)


def test_a_norm_changes_its_statistics_and_gives_new_tensors() -> None:
    graph = fx.Graph()
    x, mean, variance = map(graph.placeholder, ("x", "mean", "variance"))
    rest = (None, None, mean, variance, True, 0.1, 1e-5)
    for target in (aten._native_batch_norm_legit.default, aten.native_batch_norm.default):
        norm = graph.call_function(target, (x, *rest))
        first = graph.call_function(operator.getitem, (norm, 0))
        assert changed_by(norm) == [mean, variance]
        assert base_of(norm) is base_of(first) is None
    assert written_by(norm) == []  # its schema keeps silent
