"""Each attribute, argument and branch that makes builds is said aloud, once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import monograph as mg
from tests.support.steps import line_of

FILE = "test_each_thing.py"
BOTH = list(itertools.product((False, True), repeat=2))


class OfAttributes(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = False, False

    def build(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.first else x
        return x + 1 if self.second else x


class OfEntries(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"first": False, "second": False}

    def build(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.options["first"] else x
        return x + 1 if self.options["second"] else x


def of_arguments(x: torch.Tensor, first: Any, second: Any) -> torch.Tensor:
    x = x * 2 if first else x  # at: first
    return x + 1 if second else x  # at: second


def of_numbers(x: torch.Tensor, first: float, second: float) -> torch.Tensor:
    x = x * 2 if first > 0 else x
    return x + 1 if second > 0 else x


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_each_attribute_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    graph = OfAttributes()
    for graph.first, graph.second in BOTH * 2:
        graph(torch.ones(2))
    assert len(graph.builds) == 4
    first, second = said(caplog)
    assert "each value of graph.second has a build" in first
    assert "each value of graph.first has a build" in second


def test_each_entry_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    graph = OfEntries()
    for graph.options["first"], graph.options["second"] in BOTH * 2:
        graph(torch.ones(2))
    assert len(graph.builds) == 4
    first, second = said(caplog)
    assert "each value of graph.options['second'] has a build" in first
    assert "each value of graph.options['first'] has a build" in second


@pytest.mark.parametrize(
    ("function", "values", "named"),
    [
        (of_arguments, (False, True), ("argument second is True", "argument first is True")),
        (of_numbers, (-1.0, 1.0), ("the branch `second <= 0`", "the branch `first <= 0`")),
    ],
    ids=["flags", "floats"],
)
def test_each_branch_on_arguments_is_said_aloud(
    function: Any, values: Any, named: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    graph = mg.trace(function)
    for first, second in itertools.product(values, repeat=2):
        graph(torch.ones(2), first, second)
    assert len(graph.builds) == 4
    assert len(said(caplog)) == 2
    assert all(name in line for name, line in zip(named, said(caplog), strict=True)), said(caplog)


def test_each_line_that_reads_a_tensor_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    graph = mg.trace(of_arguments)
    for first, second in BOTH:
        graph(torch.ones(2), torch.tensor(first), torch.tensor(second))
    assert len(graph.builds) == 4
    one, other = said(caplog)
    assert f"{FILE}:{line_of('second', __file__)} is " in one
    assert f"{FILE}:{line_of('first', __file__)} is " in other
