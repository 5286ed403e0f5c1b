"""Steps that keep counters and books, run eagerly and as graphs side by side."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)


STEP = 0
TOTAL = {"calls": 0}


class Counts:
    calls = 0


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


@dataclass
class Config:
    n: int = 0
    rate: float = 1.0
    seen: dict[str, int] = field(default_factory=dict)


class Cached:
    def __init__(self) -> None:
        self.made = 0

    @functools.cached_property
    def scale(self) -> float:
        self.made += 1
        return 2.5


class Module(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls, self.average = 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.average = 0.9 * self.average + 0.1 * self.calls
        return self.layer(x)


def closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


def on_the_graph(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    return x * 2


def in_a_module(self: Any, x: torch.Tensor) -> Any:
    return self.module(x) * self.module.average


def in_a_global(self: Any, x: torch.Tensor) -> Any:
    global STEP
    STEP += 1
    return x + STEP


def every_tenth(self: Any, x: torch.Tensor) -> Any:
    self.n += 1
    if self.n % 10 == 0:
        return x * self.n
    return x


def fill(side: Any) -> None:
    """What build() finds."""
    torch.manual_seed(0)
    side.n, side.module, side.slotted, side.settings = 0, Module(), Slotted(), Config()
    side.box, side.count = SimpleNamespace(n=0, m=1), closure()
    side.seen, side.counter, side.default = {}, Counter(), defaultdict(int)
    side.ordered, side.items, side.cached = OrderedDict(a=1, b=0.5), [1, 0, 2.0], Cached()


def books(side: Any) -> dict[str, Any]:
    """What it leaves behind, with the types."""
    found: dict[str, Any] = {name: getattr(side, name, None) for name in ("n", "last", "lazy", "mode")}
    found |= {"module": (side.module.calls, side.module.average), "slotted": side.slotted.n}
    found |= {"config": vars(side.settings).copy(), "box": vars(side.box).copy()}
    found |= {"closure": side.count.__closure__[0].cell_contents, "cached": vars(side.cached).copy()}
    found |= {name: dict(getattr(side, name)) for name in ("seen", "counter", "default", "ordered")}
    return found | {"items": list(side.items), "globals": (STEP, dict(TOTAL), Counts.calls)}


def sides(build: Callable[..., Any]) -> tuple[Any, Any]:
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    fill(graph)
    fill(plain)
    return graph, plain


def outside() -> tuple[Any, ...]:
    return STEP, dict(TOTAL), Counts.calls


def put_outside(values: tuple[Any, ...]) -> None:
    global STEP
    STEP, table, Counts.calls = values
    TOTAL.update(table)


@pytest.fixture(autouse=True)
def _outside_as_before() -> Any:
    before = outside()
    yield
    put_outside(before)
