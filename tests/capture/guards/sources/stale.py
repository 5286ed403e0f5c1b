"""Cases of changes that a graph must see, and the one runner; eager mode is the judge.

Each case is a function that gives the attributes of a step, its build(), and a change. The step is run eagerly and as a
graph, twice before the change and twice after it; the reference is the same build() called on a plain object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import monograph as mg

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
Case = tuple[dict[str, Any], Callable[..., Any], Callable[[], object]]


class Cases(dict[str, Callable[[], Case]]):
    """The cases of a file by their names."""

    def add(self, make: Callable[[], Case]) -> Callable[[], Case]:
        self[make.__name__] = make
        return make


class Plain:
    """What build() runs on in plain PyTorch."""


def same_step(attributes: dict[str, Any], build: Callable[..., Any]) -> tuple[Any, Any]:
    """One step twice: on a plain object, and as a graph."""
    graph = type("Step", (mg.Graph,), {"build": build})()
    plain = type("Plain", (Plain,), {"build": build})()
    for name, value in attributes.items():
        setattr(graph, name, value)
        setattr(plain, name, value)
    return plain, graph


@dataclass
class Config:
    k: float = 2.0
    other: float = 7.0
    items: list[float] = field(default_factory=lambda: [1.0, 2.0])


CONFIG = Config()


def check_change(case: Case, *, more_builds: bool = False) -> None:
    """Run a case twice before its change and twice after it, as a graph and on a plain object."""
    attributes, build, change = case
    restore = attributes.pop("restore", lambda: None)
    plain, graph = same_step(attributes, build)
    try:
        for index in range(4):
            if index == 2:
                before = plain.build(X)
                change()
                assert not torch.equal(before, plain.build(X)), "the case changes nothing"
            expected = plain.build(X)
            try:
                got = graph(X)
            except mg.MonographError:
                continue
            assert torch.equal(expected, got), f"call {index}: {len(graph.builds)} builds"
        assert len(graph.builds) <= 2 or more_builds, [build.reason for build in graph.builds]
    finally:
        restore()
