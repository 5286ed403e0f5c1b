"""Random generators that a step can get at: it does not depend on one that it leaves alone, and on all others it does."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import monograph as mg
from tests.support import assert_same

X = torch.ones(2, dtype=torch.float64)
OF_PYTHON, OF_NUMPY, OLD = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
RESEED = np.random.seed
PARTS = ["get", "state"]
START = random.Random(7).getstate()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def draw_from_all(side: Any) -> None:
    random.random()
    np.random.rand()
    for source in (OF_PYTHON, OF_NUMPY, OLD, side.python, side.numpy):
        source.random()


def states(side: Any) -> list[Any]:
    old = [str(source.get_state()) for source in (np.random, OLD)]
    found = [str(source.bit_generator.state) for source in (OF_NUMPY, side.numpy)]
    return [*old, *found, *(source.getstate() for source in (random, OF_PYTHON, side.python))]


def fill(side: Any) -> None:
    side.python, side.numpy, side.augment = random.Random(2), np.random.default_rng(2), False
    random.seed(3)
    np.random.seed(3)
    OF_PYTHON.seed(3)
    OLD.seed(3)
    OF_NUMPY.bit_generator.state = np.random.default_rng(3).bit_generator.state


def compared(build: Callable[..., Any], steps: int = 5, *, late: bool = False) -> Any:
    """A graph of which each step is as in eager mode, while the script draws too; `late` takes the branch from the third step on."""
    trails: list[list[Any]] = []
    step = type("Step", (mg.Graph,), {"build": build})()
    plain = type("Plain", (), {"build": build, "__call__": lambda self, x: self.build(x)})()
    for side in (plain, step):
        fill(side)
        found: list[Any] = []
        for number in range(steps):
            side.augment = late and number > 1
            found += [side(X * number), states(side)]
            draw_from_all(side)
        trails.append(found)
    assert_same(*trails)
    return step


def from_python(self: Any, x: Any) -> Any:
    if self.augment:
        x = x * random.random() + random.gauss(0, 1)
    return x + 1


def from_numpy(self: Any, x: Any) -> Any:
    if self.augment:
        x = x * np.random.rand()
    return x + 1


def from_objects(self: Any, x: Any) -> Any:
    if self.augment:
        x = x * self.python.uniform(0, 1) * self.numpy.normal() * OF_PYTHON.random()
        x = x * float(OF_NUMPY.random()) + OLD.rand()
    return x + 1


@pytest.mark.parametrize("build", [from_python, from_numpy, from_objects], ids=lambda build: build.__name__)
def test_generators_in_a_branch_not_taken(build: Callable[..., Any]) -> None:
    assert len(compared(build).builds) == 1
    compared(build, late=True)


def seed_and_draw(self: Any, x: Any) -> Any:
    random.seed(3)
    return x * random.random()


def half_of_two_normal_numbers(self: Any, x: Any) -> Any:
    return x * random.gauss(0, 1) * OF_PYTHON.gauss(0, 1) * np.random.randn()


def state_of_python(self: Any, x: Any) -> Any:
    return x * (random.getstate()[1][0] % 7)


def state_behind_python(self: Any, x: Any) -> Any:
    return x * (super(random.Random, OF_PYTHON).getstate()[0] % 7)


def set_state(self: Any, x: Any) -> Any:
    random.setstate(START)
    return x * random.random()


def copied(self: Any, x: Any) -> Any:
    return x * copy.copy(self.python).random() * copy.deepcopy(self.numpy).random()


def seed_numpy(self: Any, x: Any) -> Any:
    np.random.seed(3)
    return x * np.random.rand()


def seed_by_another_name(self: Any, x: Any) -> Any:
    RESEED(3)
    return x * np.random.rand()


def state_of_numpy(self: Any, x: Any) -> Any:
    return x * (int(np.random.get_state()[1][0]) % 7)


def state_of_bits(self: Any, x: Any) -> Any:
    return x * (self.numpy.bit_generator.state["state"]["state"] % 7)


def by_a_made_up_name(self: Any, x: Any) -> Any:
    return x * (int(getattr(OLD, "_".join(PARTS))()[1][0]) % 7)


@pytest.mark.parametrize(
    "build",
    [
        seed_and_draw,
        half_of_two_normal_numbers,
        state_of_python,
        state_behind_python,
        set_state,
        copied,
        seed_numpy,
        seed_by_another_name,
        state_of_numpy,
        state_of_bits,
        by_a_made_up_name,
    ],
    ids=lambda build: build.__name__,
)
def test_generators_whose_state_is_read_or_set(build: Callable[..., Any]) -> None:
    compared(build)


@pytest.mark.parametrize("build", [seed_and_draw, seed_numpy, seed_by_another_name], ids=lambda b: b.__name__)
def test_a_trace_that_ends_at_the_state_where_it_began(build: Callable[..., Any]) -> None:
    step = type("Step", (mg.Graph,), {"build": build})()
    fill(step)
    build(step, X)
    for _ in range(3):
        expected = build(step, X)
        after = states(step)
        assert_same(expected, step(X))
        assert states(step) == after
        draw_from_all(step)
        assert_same(expected, step(X))
        assert states(step)[0] == after[0] or build is seed_and_draw
        assert states(step)[4] == after[4] or build is not seed_and_draw
