"""What Python draws by itself, generators and seeds in a step: eager's numbers, or refused by name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.traps import Plain, seed_here
from tests.support import assert_same
from tests.support.steps import graph


def test_python_and_numpy_random_keep_eager_numbers():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() + float(np.random.rand())

    def seeded() -> None:
        random.seed(0)
        np.random.seed(0)

    seeded()
    expected = [build(None, torch.ones(2)) for _ in range(3)]
    after = random.getstate(), np.random.get_state()[1].copy(), np.random.get_state()[2]
    seeded()
    step = graph(build)
    step.compile(torch.ones(2))  # draws nothing
    assert_same(expected, [step(torch.ones(2)) for _ in range(3)])
    assert random.getstate() == after[0]
    assert (np.random.get_state()[1] == after[1]).all()
    assert np.random.get_state()[2] == after[2]
    seeded()
    builds = len(step.builds)
    assert_same(expected[0], step(torch.ones(2)))  # the same draws as before need no capture
    assert len(step.builds) == builds


def test_numbers_that_torch_draws_keep_eager_values():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (x + 1 if torch.rand(()).item() > 0.5 else x - 1) * torch.rand(()).item()

    torch.manual_seed(0)
    expected = [build(None, torch.ones(2)) for _ in range(4)]
    after = torch.get_rng_state()
    torch.manual_seed(0)
    step = graph(build)
    assert_same(expected, [step(torch.ones(2)) for _ in range(4)])
    assert torch.equal(torch.get_rng_state(), after)


def seed_anew(x: torch.Tensor) -> torch.Tensor:
    torch.seed()
    return x


def set_state(x: torch.Tensor) -> torch.Tensor:
    torch.set_rng_state(torch.Generator().manual_seed(9).get_state())
    return x * torch.rand(2)


def fork(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noise = torch.rand(2)
    return x * noise


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(2, generator=torch.Generator().manual_seed(3))


OUTER = torch.Generator()


def reseeded_generator(x: torch.Tensor) -> torch.Tensor:
    OUTER.manual_seed(3)
    return x * torch.rand(2, generator=OUTER)


@pytest.mark.every_case
@pytest.mark.parametrize("body", [seed_here, seed_anew, set_state, fork, own_generator, reseeded_generator])
def test_seeding_in_build_is_refused(body):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    step = graph(lambda self, x: body(x))
    with pytest.raises(mg.CaptureError, match="random generator") as caught:
        step(torch.ones(2))
    assert caught.value.hint
    assert_same(before, torch.get_rng_state())
    assert not step.builds


@pytest.mark.every_case
@pytest.mark.parametrize("holder", ["graph", "module", "global", "closure", "argument"])
def test_explicit_generators_move_as_in_eager(holder):
    trails = []
    for kind in (Plain, graph):
        own = torch.Generator().manual_seed(4)
        OUTER.manual_seed(4)

        def build(self: Any, x: torch.Tensor, *given: torch.Generator, own: Any = own) -> torch.Tensor:
            found = {"graph": getattr(self, "generator", None), "module": self.model.generator}
            used = given[0] if given else found.get(holder) or (OUTER if holder == "global" else own)
            return x * torch.rand(2, generator=used)

        model = nn.Identity()
        model.generator = own
        step: Any = Plain(build, None) if kind is Plain else graph(build)
        step.model, step.generator = model, own
        given = (own,) if holder == "argument" else ()
        trails.append([step(torch.ones(2), *given) for _ in range(3)] + [own.get_state()])
    assert_same(*trails)
    assert len(step.builds) == 1
