"""Scripts that replace, exchange, share and change at random the lists that a step adds to: as without a graph, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monograph as mg


class Plain:
    """A step that adds to lists in attributes and dicts, in turns, and reads one list."""

    def __init__(self, flag: bool) -> None:
        self.flag = flag
        self.a: Any = []
        self.b: Any = []
        self.both: Any = {"x": [], "y": []}
        self.mixed: Any = {"z": [], "n": 0}
        self.turns: Any = {"u": [], "v": [], "idle": []}
        self.turn = "u"
        self.deep: Any = {"train": {"loss": [], "idle": []}, "val": {"loss": []}, "rows": [[], []]}
        self.read: Any = [1.0]

    def build(self, x: torch.Tensor) -> torch.Tensor:
        out = x.sum()
        self.a.append(out.detach())
        self.both["x"].append(out.detach())
        self.b.append(1)
        if self.flag:
            self.both["y"].append(2)
        self.mixed["z"].append(out.detach() * 2)
        self.a.append(3)
        self.both["x"].append(7)
        self.turns[self.turn].append(out.detach())
        self.deep["train"]["loss"].append(out.detach())
        rows = self.deep["rows"]
        rows[1].append(4)
        return out * self.read[0]

    __call__ = build


class Step(mg.Graph):
    build = Plain.build

    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.__dict__.update(vars(Plain(flag)))


def exchanged(step: Any) -> None:
    step.a, step.b = step.b, step.a


def one_in_two(step: Any) -> None:
    items: list[Any] = []
    step.both = {"x": items, "y": items}


CHANGES: dict[str, Callable[[Any, list[Any]], object]] = {
    "a": lambda s, new: setattr(s, "a", new),
    "b": lambda s, new: setattr(s, "b", new),
    "both": lambda s, new: setattr(s, "both", {"x": new, "y": []}),
    "both in another order": lambda s, new: setattr(s, "both", {"y": new, "x": []}),
    "both, by one": lambda s, new: one_in_two(s),
    "both, a copy": lambda s, new: setattr(s, "both", dict(s.both)),
    "x": lambda s, new: s.both.update(x=new),
    "x is y": lambda s, new: s.both.update(x=s.both["y"]),
    "x after y": lambda s, new: s.both.update(x=s.both.pop("x")),
    "y is a": lambda s, new: s.both.update(y=s.a),
    "y is read": lambda s, new: s.both.update(y=s.read),
    "another key": lambda s, new: s.both.update(more=new),
    "mixed": lambda s, new: setattr(s, "mixed", {"z": new, "n": len(new)}),
    "z": lambda s, new: s.mixed.update(z=new),
    "z is x": lambda s, new: s.mixed.update(z=s.both["x"]),
    "a is b": lambda s, new: setattr(s, "a", s.b),
    "b is read": lambda s, new: setattr(s, "b", s.read),
    "a and b": lambda s, new: exchanged(s),
    "name": lambda s, new: setattr(s, "turn", "v" if s.turn == "u" else "u"),
    "u": lambda s, new: s.turns["u"].append(5),
    "idle": lambda s, new: s.turns["idle"].extend(new),
    "another idle": lambda s, new: s.turns.update(idle=new),
    "u is idle": lambda s, new: s.turns.update(u=s.turns["idle"]),
    "v is read": lambda s, new: s.turns.update(v=s.read),
    "turns": lambda s, new: setattr(s, "turns", {"u": new, "v": [], "idle": [1]}),
    "deep": lambda s, new: setattr(s, "deep", {**s.deep, "train": {"loss": new, "idle": []}}),
    "train": lambda s, new: s.deep.update(train={"loss": new, "idle": [2]}),
    "val": lambda s, new: s.deep["val"]["loss"].extend(new),
    "another val": lambda s, new: s.deep.update(val={"loss": new}),
    "val is train": lambda s, new: s.deep.update(val=s.deep["train"]),
    "train is idle": lambda s, new: s.deep["train"].update(loss=s.deep["train"]["idle"]),
    "train is read": lambda s, new: s.deep["train"].update(loss=s.read),
    "rows": lambda s, new: s.deep.update(rows=[new, []]),
    "rows are one": lambda s, new: s.deep.update(rows=[new, new]),
    "more rows": lambda s, new: s.deep["rows"].insert(0, new),
    "first row": lambda s, new: s.deep["rows"][0].append(8),
    "read": lambda s, new: setattr(s, "read", [float(len(new))]),
    "read in place": lambda s, new: s.read.__setitem__(0, float(len(new))),
    "flag": lambda s, new: setattr(s, "flag", not s.flag),
    "clear": lambda s, new: s.a.clear(),
    "append": lambda s, new: s.b.append(5),
}


def seen(step: Any) -> Any:
    """What all lists hold, and which of them are one."""
    lists = [step.a, step.b, step.read, step.mixed["z"], *step.both.values(), *step.turns.values()]
    lists += [*step.deep["rows"], *step.deep["train"].values(), *step.deep["val"].values()]
    held = [[item.item() if torch.is_tensor(item) else item for item in items] for items in lists]
    return held, list(step.both), [[other is items for other in lists] for items in lists]


@pytest.mark.parametrize("seed", range(28, 34))
def test_lists_at_random(seed: int) -> None:
    changed_at_random(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_lists_at_random_again(seed: int) -> None:
    changed_at_random(seed)


def changed_at_random(seed: int) -> None:
    draw = random.Random(seed)
    graph, plain, log = Step(bool(seed % 2)), Plain(bool(seed % 2)), []
    for _ in range(9):
        for name in draw.choices(list(CHANGES), k=draw.randrange(3)):
            new = [draw.randrange(9) for _ in range(draw.randrange(3))]
            log.append(name)
            for step in (graph, plain):
                CHANGES[name](step, list(new))
        for _ in range(draw.randrange(1, 3)):
            x = torch.full((3,), float(draw.randrange(4)))
            log.append("step")
            assert graph(x).item() == plain(x).item(), log
            assert seen(graph) == seen(plain), log
