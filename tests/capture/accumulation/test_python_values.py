"""Numbers, lists and objects that each micro-batch changes: refused, with what works instead."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same
from tests.support.steps import graph, sgd

PARTS = 3


class Kept(nn.Module):
    """Keeps something of each forward in `kept`."""

    def __init__(self, kept: Any, change: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.kept, self.change = nn.Linear(4, 3), None, change
        if isinstance(kept, torch.Tensor):
            del self.kept
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        self.change(self, y.detach().mean())
        return y.square().mean()


def build(self: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = self.model(x)
    loss.backward()
    return loss


def count(self: Any, _: Any) -> None:
    self.kept += 1


def add(self: Any, loss: torch.Tensor) -> None:
    self.kept = self.kept + loss.item()


def count_inside(key: Any) -> Callable[..., None]:
    def change(self: Any, _: Any) -> None:
        self.kept[key] += 1

    return change


def count_of_object(self: Any, _: Any) -> None:
    self.kept.n += 1


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], str]] = {
    "a counter": (lambda: 0, count, "register_buffer"),
    "a total": (lambda: 0.0, add, "buffer"),
    "an entry of a dict": (lambda: {"n": 0}, count_inside("n"), "register_buffer"),
    "an entry of a Counter": (Counter, count_inside("n"), "register_buffer"),
    "an entry of a defaultdict": (lambda: defaultdict(int), count_inside("n"), "register_buffer"),
    "an item of a list": (lambda: [0], count_inside(0), "register_buffer"),
    "an attribute of an object": (lambda: SimpleNamespace(n=0), count_of_object, "register_buffer"),
    "a list that it reads": (list, lambda self, _: self.kept.append(len(self.kept)), "after the step"),
    "a deque": (deque, lambda self, _: self.kept.append(1), "after the step"),
    "a set": (set, lambda self, _: self.kept.add(len(self.kept)), "after the step"),
    "an iterator": (itertools.count, lambda self, _: next(self.kept), "after the step"),
    "a draw": (lambda: 0, lambda self, _: random.random(), "after the step"),
    "a list of tensors": (list, lambda self, loss: self.kept.append(loss), "after the call"),
    "a list of losses": (list, lambda self, loss: self.kept.append(loss.item()), "after the call"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_each_micro_batch_changes_is_refused(name):
    make, change, hint = CASES[name]
    model = Kept(make(), change)
    step = graph(build, model=model)
    step.add_optimizer(sgd(model))
    step.config.set_gradient_accumulation_steps(PARTS)
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(6, 4))
    assert hint in caught.value.hint
    assert "run the model once" not in caught.value.hint


def test_each_micro_batch_adds_the_same_constants_to_a_list():
    kept = []
    for eager in (True, False):
        shapes: list[Any] = []
        model = Kept(shapes, lambda self, loss: self.kept.extend([loss.shape, "seen"]))
        step = graph(build, model=model)
        step.add_optimizer(sgd(model))
        step.config.set_gradient_accumulation_steps(PARTS)
        for x in torch.ones(3, 6, 4):
            if eager:
                for part in x.chunk(PARTS):
                    model(part)
            else:
                step(x)
        kept.append(shapes)
        assert len(step.builds) == (0 if eager else 1)
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2 * 3 * PARTS


def roll(self: Any, loss: torch.Tensor) -> None:
    self.kept.copy_(torch.cat([self.kept[1:], loss.view(1)]))


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((), lambda self, _: self.kept.add_(1)),
        ((), lambda self, loss: self.kept.add_(loss)),
        ((), lambda self, loss: self.kept.mul_(0.9).add_(loss, alpha=0.1)),
        ((10,), roll),
    ],
    ids=["count", "total", "average", "last ten"],
)
def test_a_buffer_is_changed_by_each_micro_batch(shape, change):
    trails = []
    for eager in (True, False):
        torch.manual_seed(0)
        model = Kept(torch.zeros(shape), change)
        optimizer, step = sgd(model), graph(build, model=model)
        step.add_optimizer(optimizer)
        step.config.set_gradient_accumulation_steps(PARTS)
        for x in torch.randn(4, 6, 4, generator=torch.Generator().manual_seed(1)):
            if eager:
                optimizer.zero_grad()
                for part in x.chunk(PARTS):
                    (model(part) / PARTS).backward()
                optimizer.step()
            else:
                step(x)
        trails.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert_same(*trails)
    assert len(step.builds) == 1


def test_the_number_of_the_last_micro_batch_is_refused() -> None:
    def change(self: Any, loss: torch.Tensor) -> None:
        self.kept = loss.item()

    model = Kept(0.0, change)
    step = graph(build, model=model)
    step.add_optimizer(sgd(model))
    step.config.set_gradient_accumulation_steps(PARTS)
    with pytest.raises(mg.CaptureError, match=r"kept, and no replay can do that for each micro-batch"):
        step(torch.randn(2 * PARTS, 4))
