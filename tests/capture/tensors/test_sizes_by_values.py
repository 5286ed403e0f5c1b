"""Ops of torch whose results have as many elements as values decide: captured where these are there before the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.traps import compare, forward, train
from tests.support import assert_same
from tests.support.steps import graph, linear

MASK = torch.tensor([True, False, True, True])
X = torch.arange(18.0).view(9, 2)
FLAG = torch.tensor(True)


class Masked(nn.Module):
    """Computes with rows that a mask chooses, which is no part of it."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.fc, self.mask_of = linear(), lambda: mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)[self.mask_of()]
        return y * 2 if FLAG else y


def batches() -> list[torch.Tensor]:
    return list(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1)))


def test_a_mask_in_a_closure_and_a_flag_that_is_global():
    compare(train, make=lambda: Masked(MASK.clone()), calls=batches)


def test_a_mask_from_outside_that_changes():
    def calls(step: Any, mask: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for number, x in enumerate(batches()):
            if number == 2:
                mask[0] = False
            if number == 4:
                mask[0] = True
            results.append(step(x).detach().clone())
        return results

    outside, counterpart = MASK.clone(), MASK.clone()
    model = linear()
    step = graph(lambda self, x: self.model(x)[outside], model=model)
    assert_same(calls(lambda x: model(x)[counterpart], counterpart), calls(step, outside))
    assert len(step.builds) == 2


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("weights", [None, torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("minlength", [0, 40])
def test_bincount_of_an_argument(kind, weights, minlength):
    def build(self: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return torch.bincount(x, weight, minlength)

    step, generator = graph(build), torch.Generator().manual_seed(0)
    for size in (100, 100, 200, 0):
        x = torch.randint(0, 30, (size,), generator=generator).to(kind)
        x[:1] = 29
        weight = None if weights is None else (10 * torch.rand(size, generator=generator)).to(weights)
        assert_same(build(None, x, weight), step(x, weight))
    if minlength == 40:
        assert len(step.builds) == 3  # for one size, any size, and none
    with pytest.raises(RuntimeError, match="non-negative"):
        graph(build)(torch.tensor([0, -1]), None)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_bincount_of_what_the_step_computes_has_minlength_results(backend: str):
    def counts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.bincount(model(x).detach().relu().long(), minlength=40)

    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    nn.init.constant_(model[0].weight, 0.1)
    step = graph(lambda self, x: (counts(self.model, x), self.total.add_(1)), model=model)
    step.total = torch.zeros(())
    step.config.backend(backend)
    for factor in (1.0, 5.0):
        assert_same(counts(model, factor * X), step(factor * X)[0])
    nn.init.constant_(model[0].bias, 41.0)
    with pytest.raises(RuntimeError, match="a value is not below minlength"):
        step(X)
    assert len(step.builds) == 1
    assert step.total == 2


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_unique_of_an_argument(kind: torch.dtype):
    def build(self: Any, x: torch.Tensor) -> Any:
        return torch.unique(x), *torch.unique(x, return_counts=True), x.unique().sum()

    step, generator = graph(build), torch.Generator().manual_seed(0)
    for largest in (1, 1, 5, 5, 5):
        x = torch.randint(0, largest + 1, (3, 9), generator=generator).to(kind)
        assert_same(build(None, x), step(x))
    assert len(step.builds) <= 3  # a build for each number of results


@pytest.mark.parametrize(
    "ask", [lambda x: x.unique(return_inverse=True), lambda x: x.float().unique()], ids=["places", "floats"]
)
def test_unique_that_stays_refused(ask: Any):
    with pytest.raises(mg.DataDependentError, match=r"unique\(\)"):
        graph(lambda self, x: ask(x))(torch.tensor([1, 2, 1]))


def test_bincount_to_a_length_that_varies():
    """One build for all batches whose values fit into it."""

    def build(self: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return x.sum() * torch.bincount(labels, minlength=len(x))

    step = graph(build)
    for size, largest in [(4, 2), (5, 3), (7, 1), (9, 8), (6, 0), (6, 9), (5, 3)]:
        labels = torch.tensor([0, largest, 0])
        assert_same(build(None, X[:size], labels), step(X[:size], labels), f"{size} rows")
    assert len(step.builds) == 3  # for one size, for more, and for a value beyond


def test_a_number_that_moves_beside_values_that_are_read():
    """What looks at both is right, with a build for each number."""

    def build(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.allclose(y, y + 0.05, atol=0.01 * len(x)) else -x

    step = graph(build)
    for size in (4, 5, 7, 9, 5, 4):
        assert_same(build(None, X[:size], X[0]), step(X[:size], X[0]), f"{size} rows")


OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bincount()": lambda x: torch.bincount(x.long()),
    "nonzero()": lambda x: x.nonzero(),
    "a boolean mask": lambda x: x[x > 1],
    "argwhere()": lambda x: torch.argwhere(x),
    "torch.where(mask)": lambda x: torch.where(x > 1),
    "masked_select()": lambda x: x.masked_select(x > 1),
    "unique()": lambda x: x.unique(return_counts=True),
    "unique() ": lambda x: torch.unique_consecutive(x),
    "repeat_interleave()": lambda x: x.repeat_interleave(x.long()),
    "torch.equal()": lambda x: x if torch.equal(x, x + 1) else -x,
    "torch.allclose()": lambda x: x if torch.allclose(x, x + 1) else -x,
}


class Scaled(nn.Module):
    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.ask = nn.Parameter(torch.ones(())), ask

    def forward(self, x: torch.Tensor) -> Any:
        return self.ask((x * self.weight).detach())


@pytest.mark.parametrize("name", OPS)
def test_an_op_that_needs_values_of_the_step_is_named(name):
    with pytest.raises(mg.DataDependentError) as caught:
        graph(forward, model=Scaled(OPS[name]))(torch.tensor([0.0, 1.0, 1.0, 3.0]))
    assert name.strip() in caught.value.message
    assert "torch.where" in caught.value.hint


HINTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "counts": lambda x: torch.zeros(4, dtype=torch.long).index_add_(0, x.long(), torch.ones_like(x.long())),
    "counts of some": lambda x: torch.zeros(4, dtype=torch.long).index_add_(
        0, x.long(), torch.where(x > 0, 1, 0)
    ),
    "masked": lambda x: (torch.where(x > 1, x, 0).sum(), (x > 1).sum()),
    "distinct": lambda x: torch.where(x.sort().values.diff() != 0, 1, 0).sum() + 1,
    "repeats": lambda x: x.repeat_interleave(x.long(), output_size=5),
    "equal": lambda x: torch.where((x == x * 1).all(), x, -x),
    "close": lambda x: torch.where(torch.isclose(x, x + 1).all(), x, -x),
}


@pytest.mark.parametrize("name", HINTS)
def test_what_the_hints_give_is_captured(name):
    model = Scaled(HINTS[name])
    step = graph(forward, model=model)
    for _ in range(2):
        x = torch.tensor([0.0, 1.0, 1.0, 3.0])
        assert_same(model(x), step(x))
    assert len(step.builds) == 1
