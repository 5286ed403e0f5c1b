"""Floats that a function of torch takes as constants: the function is named, and what has one build for all values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg

NUMBERS = (0.3, 0.25, 0.2, 0.15)
torch.manual_seed(0)
X, Y, CLASSES = torch.randn(4, 6), torch.randn(4, 6), torch.tensor([0, 5, 2, 3])
SIGNS, ROWS = torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.randn(2, 4, 6)

Function = Callable[[float], torch.Tensor]
# what takes the number, what the advice says to write, and that
SAME: dict[str, tuple[Function, str, Function]] = {
    "cross_entropy": (
        lambda n: F.cross_entropy(X, CLASSES, label_smoothing=n),
        "(1 - n) * F.cross_entropy(x, y) - n * F.log_softmax(x, 1).mean(), with x the logits and y the target, which is the same "
        "where there are no class weights, no ignored labels (ignore_index) and reduction is the mean",
        lambda n: (1 - n) * F.cross_entropy(X, CLASSES) - n * F.log_softmax(X, 1).mean(),
    ),
    "huber_loss": (
        lambda n: F.huber_loss(X, Y, delta=n),
        "torch.where(d < n, 0.5 * d * d, n * (d - 0.5 * n)).mean()",
        lambda n: torch.where((d := (X - Y).abs()) < n, 0.5 * d * d, n * (d - 0.5 * n)).mean(),
    ),
    "smooth_l1_loss": (
        lambda n: F.smooth_l1_loss(X, Y, beta=n),
        "torch.where(d < n, 0.5 * d * d / n, d - 0.5 * n).mean()",
        lambda n: torch.where((d := (X - Y).abs()) < n, 0.5 * d * d / n, d - 0.5 * n).mean(),
    ),
    "margin_ranking_loss": (
        lambda n: F.margin_ranking_loss(X[:, 0], Y[:, 0], SIGNS, margin=n),
        "(n - y * (a - b)).clamp(min=0).mean()",
        lambda n: (n - SIGNS * (X[:, 0] - Y[:, 0])).clamp(min=0).mean(),
    ),
    "triplet_margin_loss": (
        lambda n: F.triplet_margin_loss(X, Y, X * Y, margin=n),
        "F.triplet_margin_with_distance_loss(a, p, q, margin=n)",
        lambda n: F.triplet_margin_with_distance_loss(X, Y, X * Y, margin=n),
    ),
    "scaled_dot_product_attention": (
        lambda n: F.scaled_dot_product_attention(ROWS, ROWS, ROWS, scale=n),
        "F.scaled_dot_product_attention(n * q, k, v, scale=1.0)",
        lambda n: F.scaled_dot_product_attention(n * ROWS, ROWS, ROWS, scale=1.0),
    ),
}
# what draws other numbers, or what a user has to write out
OTHERS: dict[str, tuple[Function, str]] = {
    "dropout": (lambda n: F.dropout(X, n), "x * (torch.rand_like(x) >= n) / (1 - n)"),
    "uniform_": (lambda n: torch.empty(4).uniform_(0, n), "n * torch.rand(shape)"),
    "normal": (lambda n: torch.normal(0.0, n, (4,)), "n * torch.randn(shape)"),
    "cosine_embedding_loss": (
        lambda n: F.cosine_embedding_loss(X, Y, SIGNS, margin=n),
        "a number n that only ops compute with",
    ),
    "layer_norm": (lambda n: F.layer_norm(X, (6,), eps=n), "a number n that only ops compute with"),
}


class Annealed(mg.Graph):
    """A step with a number that changes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.n = function, 0.0

    def build(self) -> torch.Tensor:
        return self.function(self.n)


def results(graph: Annealed) -> list[torch.Tensor]:
    found = []
    for number in NUMBERS:
        graph.n = number
        found.append(graph())
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("name", SAME)
def test_what_to_write_has_one_build_and_the_same_value(name: str) -> None:
    taking, written, writing = SAME[name]
    graph, followed = Annealed(taking), Annealed(writing)
    for one, other in zip(results(graph), results(followed), strict=True):
        torch.testing.assert_close(one, other)
    assert len(graph.builds) == len(NUMBERS)
    for build in graph.builds[1:]:
        assert f"needs the number itself, which {name}() takes as a constant" in build.reason.advice
        assert f"for one build with a number n write {written}" in build.reason.advice.replace(
            "d = (x - y).abs() and ", ""
        )
    assert len(followed.builds) == 2  # the second one for all further values


@pytest.mark.every_case
@pytest.mark.parametrize("name", OTHERS)
def test_the_function_is_named(name: str) -> None:
    taking, written = OTHERS[name]
    graph = Annealed(taking)
    results(graph)
    assert f"needs the number itself, which {name}() takes as a constant" in graph.builds[-1].reason.advice
    assert written in graph.builds[-1].reason.advice


def test_the_number_may_be_that_of_a_module_or_an_argument() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    of_module = Annealed(lambda n: loss(X, CLASSES))
    of_module.loss = loss
    given = mg.trace(lambda n: F.cross_entropy(X, CLASSES, label_smoothing=n))
    for number in NUMBERS:
        loss.label_smoothing = number
        of_module()
        given(number)
    for graph in (of_module, given):
        assert len(graph.builds) == len(NUMBERS)
        assert "which cross_entropy() takes as a constant" in graph.builds[-1].reason.advice


def test_python_takes_a_number_by_no_function_of_torch() -> None:
    graph = Annealed(lambda n: X * float(f"{n:.1f}"))
    results(graph)
    assert "as float(), NumPy's functions" in graph.builds[-1].reason.advice
