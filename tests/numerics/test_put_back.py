"""A look at a step changes nothing: what the step draws from is put back, or the look is refused."""

from __future__ import annotations

import contextvars
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg

X = torch.ones(2, 4)
Draw = Callable[[Any], float]
Kind = tuple[Callable[[], Any], Draw]
NUMBERS = [float(number) for number in range(50)]


def _counted() -> Iterator[float]:
    yield from NUMBERS


def _count_up(memory: Any) -> float:
    memory[0] += 1
    return float(memory[0])


def _move(variable: Any) -> float:
    variable.set(variable.get() + 1)
    return float(variable.get())


PUT_BACK: dict[str, Kind] = {
    "numpy.random.Generator": (lambda: np.random.default_rng(0), lambda it: float(it.random())),
    "numpy.random.RandomState": (lambda: np.random.RandomState(0), lambda it: float(it.rand())),
    "random.Random": (lambda: random.Random(0), lambda it: it.gauss(0.0, 1.0)),
    "an iterator over a list": (lambda: iter(NUMBERS), next),
    "an iterator over a range": (lambda: iter(range(50)), next),
    "zip": (lambda: zip(NUMBERS, NUMBERS, strict=True), lambda it: next(it)[0]),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
    "an array": (lambda: np.zeros(2), _count_up),
    "a bytearray": (lambda: bytearray(2), _count_up),
}
NOT_PUT_BACK: dict[str, Kind] = {
    "count": (itertools.count, next),
    "enumerate": (lambda: enumerate(NUMBERS), lambda it: sum(next(it))),
    "a generator": (_counted, next),
    "a context variable": (lambda: contextvars.ContextVar("moved", default=1), _move),
}


class Drawing(mg.Graph):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        make, self.draw = kind
        self.drawn = make()

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean() * (self.draw(self.drawn) + 0.5)
        loss.backward()
        return loss


def _eager(kind: Kind, steps: int) -> list[float]:
    """Plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn, losses = kind[0](), []
    for _ in range(steps):
        loss = model(X).square().mean() * (kind[1](drawn) + 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", PUT_BACK.values(), ids=PUT_BACK)
def test_verify_holds_and_changes_nothing(kind: Kind):
    step = Drawing(kind)
    losses = [step(X).item()]
    report = step.verify(X)
    assert report.ok, str(report)
    losses += [step(X).item() for _ in range(2)]
    assert losses == _eager(kind, 3)


def test_verify_changes_nothing_before_the_first_step():
    kind = PUT_BACK["numpy.random.Generator"]
    step = Drawing(kind)
    assert step.verify(X).ok
    assert step(X).item() == _eager(kind, 1)[0]


@pytest.mark.parametrize("look", ["memory", "profile", "find_nonfinite", "summary", "replay", "compile"])
def test_other_looks_change_nothing(look: str):
    kind = PUT_BACK["random.Random"]
    step = Drawing(kind)
    losses = [step(X).item()]
    getattr(step, look)(X)
    losses += [step(X).item() for _ in range(2)]
    assert losses == _eager(kind, 3)


@pytest.mark.parametrize("look", ["verify", "memory"])
@pytest.mark.parametrize("kind", list(NOT_PUT_BACK.values())[:3], ids=list(NOT_PUT_BACK)[:3])
def test_what_cannot_be_put_back_is_refused_before_anything_runs(kind: Kind, look: str):
    step = Drawing(kind)
    losses = [step(X).item()]
    with pytest.raises(
        mg.errors.CaptureError, match=r"build\(\) changes graph.drawn, which cannot be put back"
    ):
        getattr(step, look)(X)
    losses += [step(X).item() for _ in range(2)]
    assert losses == _eager(kind, 3)


@pytest.mark.parametrize("kind", NOT_PUT_BACK.values(), ids=NOT_PUT_BACK)
def test_before_the_first_step_a_look_says_what_it_has_changed(kind: Kind, caplog: pytest.LogCaptureFixture):
    with pytest.raises(mg.errors.CaptureError, match=r"verify\(\) has captured the step, and build"):
        Drawing(kind).verify(X)
    Drawing(kind).compile(X)
    assert "graph.drawn is as after a step, and cannot be put back" in caplog.text


def test_max_batch_captures_often_and_puts_back():
    step = Drawing(PUT_BACK["random.Random"])
    assert step.max_batch(X, memory="1 MiB") > 1
    assert step(X).item() == _eager(PUT_BACK["random.Random"], 1)[0]
    with pytest.raises(mg.errors.CaptureError, match="captures the step at several sizes"):
        Drawing(NOT_PUT_BACK["count"]).max_batch(X, memory="1 MiB")
