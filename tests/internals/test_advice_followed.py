"""Advice that is followed: what the line says to write is what makes the builds stop, and it promises nothing that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import monograph as mg
from tests.support.steps import line_of


class Counter(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def build(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x.sum() + torch.zeros(self.n, 1).sum()  # at: the size


class Weights(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.w = [1.0, 2.0]

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.tensor(self.w)).sum()


class Keys(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.Tensor] = {}

    def build(self, x: torch.Tensor, n: int) -> torch.Tensor:
        self.seen[n] = x.detach().sum()
        return x.sum()


def advised(graph: Any) -> str:
    text: str = graph.builds[-1].reason.advice
    return text


def x(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 2)


def test_a_number_that_is_a_size_is_not_to_be_a_float() -> None:
    graph = Counter()
    for _ in range(3):
        graph(x())
    assert f"test_advice_followed.py:{line_of('the size', __file__)} needs the number itself" in advised(
        graph
    )
    assert "float" not in advised(graph)
    assert "x.shape[0]" in advised(graph)
    followed = mg.trace(lambda x, pad: x.sum() + torch.zeros(pad.shape[0], 1).sum())
    for rows in (2, 3, 4, 5):
        followed(x(), x(rows))
    assert len(followed.builds) == 2
    masked = mg.trace(lambda x, n: (x * (torch.arange(4)[:, None] < n)).sum())
    for n in (1, 2, 3, 4):
        masked(x(), n)
    assert len(masked.builds) == 2


@pytest.mark.parametrize(
    ("graph", "arguments"),
    [
        (lambda: mg.trace(lambda x, lens: [part.sum() for part in x.split(lens)]), ([1, 3], [2, 2])),
        (Keys, (1, 2)),
        (lambda: mg.trace(lambda x, n: x.sum() + torch.zeros(int(n), 1).sum()), (1.0, 2.0)),
        (lambda: mg.trace(lambda x, n: x[:, : int(n.max())].sum()), (torch.tensor(1), torch.tensor(2))),
    ],
    ids=["lengths of a split", "key of a dict", "float by int()", "value of a tensor"],
)
def test_arguments_that_are_needed_themselves(graph: Callable[[], Any], arguments: Any) -> None:
    made = graph()
    for item in arguments:
        made(x(), item)
    assert len(made.builds) == 2
    assert "a fixed size and a mask" in advised(made)
    assert "float" not in advised(made)


def test_numbers_for_a_new_tensor_come_as_a_tensor() -> None:
    graph = Weights()
    for second in (1.0, 2.5, 3.5):
        graph.w = [1.0, second]
        graph(x())
        if len(graph.builds) > 1:
            assert "torch.tensor([...]) as an argument" in advised(graph)
    assert len(graph.builds) == 3
    followed = mg.trace(lambda x, w: (x * w).sum())
    for second in (1.0, 2.5, 3.5):
        followed(x(), torch.tensor([1.0, second]))
    assert len(followed.builds) == 1


@dataclass
class Batch:
    x: torch.Tensor
    ids: list[int]
    path: str


@pytest.mark.parametrize("rows", [4, 5])
def test_what_cannot_vary_leads(rows: int) -> None:
    graph = mg.trace(lambda batch: batch.x.sum())
    for number in range(4):
        graph(Batch(x(rows if number % 2 else 4), [number, number + 1], f"{number}.png"))
    for build in graph.builds[1:]:
        assert build.reason.startswith("argument batch.path is ")
        assert "each value of batch.path has a build" in build.reason.advice


def test_parts_of_larger_tensors() -> None:
    """One build serves all sizes of parts of tensors of one size, as x[:, :n]; other strides need another."""
    graph, larger = mg.trace(lambda x, y: (x * y).sum()), torch.randn(4, 30)
    for columns in (6, 8, 7, 9, 12):
        graph(larger[:, :columns], torch.ones(4, columns))
    assert len(graph.builds) == 2
    graph(torch.randn(4, 20)[:, :5], torch.ones(4, 5))
    assert len(graph.builds) == 3
    assert "with the strides of x; x.contiguous() has one build for all strides" in advised(graph)
    followed = mg.trace(lambda x: x.sum())
    for columns in (8, 12, 16, 20):
        followed(torch.randn(4, columns + 4)[:, :columns].contiguous())
    assert len(followed.builds) == 2


def test_strides_that_do_not_follow_from_sizes() -> None:
    graph = mg.trace(lambda x, y: (x * y).sum())
    for rows in (6, 4, 3):
        graph(torch.ones(1, 2).expand(rows, 2), x(rows))
        if rows < 6:
            assert "the strides of x do not follow from sizes: pass x.contiguous()" in advised(graph)


def test_all_arguments_that_differ_are_to_be_padded() -> None:
    graph = mg.trace(lambda x, y: x.sum() * len(f"{y.shape[0]}") + y.sum())
    for rows in (4, 3):
        graph(x(rows), x(rows))
    both = 'config.buckets(mg.buckets("x", dim=0, sizes=[...]), mg.buckets("y", dim=0, sizes=[...]))'
    assert both in advised(graph)


@pytest.mark.parametrize("before", [False, True], ids=["first call", "after others"])
def test_sizes_that_do_not_fit_say_what_is_padded(before: bool) -> None:
    graph = mg.trace(lambda x, y: (x - y).square().sum())
    graph.config.buckets(mg.buckets("x", dim=0, sizes=[4, 8]))
    if before:
        graph(x(4), x(4))
    with pytest.raises(mg.MonographError) as caught:
        graph(x(3), x(3))
    assert "config.buckets() pads x (dim 0), and these are not: y (3, 2)" in caught.value.hint


def test_a_function_belongs_on_the_graph() -> None:
    graph = mg.trace(lambda x, loss_fn: loss_fn(x))
    for function in (lambda x: x.sum(), torch.sum):
        with pytest.raises(mg.SignatureError, match="argument loss_fn is a function, which") as caught:
            graph(x(), function)
        assert "self.loss_fn = ..." in caught.value.hint


def test_a_number_that_moves_needs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "monograph")
    graph = mg.trace(lambda x, n: x.sum() * n)
    for n in (1, 2, 3, 4):
        graph(x(), n)
    assert len(graph.builds) == 2
    assert "one build serves all further values of n: nothing to do" in caplog.text
