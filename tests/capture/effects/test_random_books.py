"""Random steps that keep numbers, tensors and objects in dicts, lists and attributes: after each step there is what eager mode leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

TABLE: dict[str, Any] = {}
ITEMS: list[Any] = []
HELD: dict[str, Any] = {}  # the model, and an object that is there before
KEYS = ["a", "b", "c", "d"]


class Box:
    """An object that keeps what it is given."""


def an_object(tensor: torch.Tensor, factor: int) -> Box:
    box = Box()
    box.tensor, box.factor = tensor, factor  # type: ignore[attr-defined]
    return box


KINDS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "constant": lambda _, factor: factor,
    "tensor": lambda tensor, _: tensor,
    "number": lambda tensor, _: tensor.item(),
    "tuple": lambda tensor, factor: (tensor.mean(), tensor.item(), factor),
    "dict": lambda tensor, _: {"tensor": tensor, "number": tensor.item()},
    "list": lambda tensor, factor: [tensor, factor],
    "object": an_object,
    "text": lambda _, factor: f"times {factor}",
    "parameter": lambda *_: HELD["model"].fc.weight,
    "known": lambda *_: HELD["box"],
}


def change_dict(table: dict[str, Any], op: str, key: str, made: Any, other: Any) -> None:
    if op == "set":
        table[key] = made
    elif op == "pop":
        table.pop(key, None)
    elif op == "clear":
        table.clear()
    elif op == "setdefault":
        table.setdefault(key, made)
    elif op == "update":
        table.update({key: made, "z": other})
    else:
        before = table.get(key)
        table[key] = (before if isinstance(before, float) else 0.0) + 1


def change_list(items: list[Any], op: str, made: Any) -> None:
    if op == "append":
        items.append(made)
    elif op == "insert":
        items.insert(0, made)
    elif op == "clear":
        items.clear()
    elif items and op == "set":
        items[-1] = made
    elif items:
        items.pop(0)


OPS = {
    "dict": ["set", "set", "set", "pop", "clear", "setdefault", "update", "count"],
    "list": ["append", "append", "insert", "clear", "set", "pop"],
    "attribute": ["set"],
}
PLACES = {
    "own dict": "dict",
    "global dict": "dict",
    "own list": "list",
    "global list": "list",
    "box": "attribute",
    "own": "attribute",
}


class Model(nn.Module):
    """Does what a random program says with its loss."""

    def __init__(self, program: list[tuple[Any, ...]], begin: dict[str, Any]) -> None:
        super().__init__()
        self.fc, self.program = nn.Linear(3, 3), program
        self.table, self.items, self.box = dict(begin), list(begin.values()), Box()
        self.mean = self.box.mean = 0.5  # type: ignore[attr-defined]
        self.last = self.box.last = None  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.fc(x).square().mean()
        for place, op, key, (kind, factor), (other, _) in self.program:
            made = KINDS[kind](loss.detach() * factor, factor)
            if place.endswith("dict"):
                table = self.table if place == "own dict" else TABLE
                change_dict(table, op, key, made, KINDS[other](loss.detach(), factor))
            elif place.endswith("list"):
                change_list(self.items if place == "own list" else ITEMS, op, made)
            elif place == "box":
                if key in "ab":
                    self.box.mean = made  # type: ignore[attr-defined]
                else:
                    self.box.last = made  # type: ignore[attr-defined]
            elif isinstance(made, nn.Parameter):
                self.last = (made,)  # by itself it would be one of this module, too
            elif key in "ab":
                self.mean = made
            else:
                self.last = made
        return loss


def told(item: Any) -> Any:
    """What can be compared in a value."""
    if isinstance(item, torch.Tensor):
        return type(item).__name__, item.tolist(), item.requires_grad
    if isinstance(item, dict):
        return {name: told(value) for name, value in item.items()}, list(item)
    if isinstance(item, (list, tuple)):
        return type(item).__name__, [told(value) for value in item]
    return ("Box", told(vars(item))) if isinstance(item, Box) else (type(item).__name__, item)


def trail(program: list[tuple[Any, ...]], begin: dict[str, Any], *, eager: bool, empties: bool) -> Any:
    """What is there after each of four steps, or the first line of a refusal; `empties` is what the script does in between."""
    TABLE.clear()
    TABLE.update(begin)
    ITEMS[:] = begin.values()
    torch.manual_seed(0)
    model = Model(program, begin)
    HELD.update(model=model, box=an_object(torch.ones(()), 3))
    step = model if eager else mg.trace(model)
    found = []
    for value in range(1, 5):
        try:
            step(torch.full((2, 3), float(value)))
        except mg.CaptureError as error:
            return error.message
        kept = [model.table, model.items, vars(model.box), model.mean, model.last, TABLE, ITEMS]
        found.append([told(item) for item in kept])
        if empties:
            for content in (model.table, model.items, TABLE):
                content.clear()  # type: ignore[attr-defined]
    return found


def compare(seed: int) -> None:
    draw = random.Random(seed)
    kinds = list(KINDS)
    places = [draw.choice(list(PLACES)) for _ in range(draw.randint(1, 2))]
    program = []
    for _ in range(draw.randint(1, 4)):
        place = draw.choice(places)
        values = [(draw.choice(kinds), draw.randint(1, 4)) for _ in range(2)]
        program.append((place, draw.choice(OPS[PLACES[place]]), draw.choice(KEYS), *values))
    begin = {key: draw.choice([None, *map(float, range(6))]) for key in KEYS if draw.random() < 0.4}
    empties = draw.random() < 0.3
    expected = trail(program, begin, eager=True, empties=empties)
    found = trail(program, begin, eager=False, empties=empties)
    if isinstance(found, str):
        assert "no replay can" in found, (program, begin, found)
    else:
        assert found == expected, (program, begin, empties)


@pytest.mark.every_case
@pytest.mark.parametrize("begin", range(0, 30, 10))
def test_random_steps_leave_what_eager_mode_leaves(begin: int) -> None:
    for seed in range(begin, begin + 10):
        compare(seed)


@pytest.mark.search
@pytest.mark.parametrize("begin", range(30, 600, 10))
def test_more_random_steps(begin: int) -> None:
    for seed in range(begin, begin + 10):
        compare(seed)
