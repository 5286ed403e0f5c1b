"""One file reads and sets the states of random generators."""

from __future__ import annotations

import random
import re

import numpy as np
import torch

from monograph.state.random import RandomState, SavedGenerators, copied_generator, set_random_state
from tests.support import ROOT

PACKAGE = ROOT / "monograph"
OTHERS = ("cli/", "testing/", "flow/")  # they use public names alone
TOUCH = re.compile(
    r"[sg]et_rng_state|random\.[sg]etstate\(|numpy\.random\.[sg]et_state|np\.random\.[sg]et_state|generator\.[sg]et_state"
)


def test_nothing_else_reads_or_sets_them() -> None:
    found = [
        path
        for file in PACKAGE.rglob("*.py")
        if TOUCH.search(file.read_text())
        and not (path := file.relative_to(PACKAGE).as_posix()).startswith(OTHERS)
    ]
    assert sorted(found) == ["artifact/state/python_state.py", "state/random.py"]


def test_generators_that_have_moved_go_back() -> None:
    still, moved = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    saved, first = SavedGenerators([still, moved]), copied_generator(moved)
    drawn = torch.rand(3, generator=moved)
    assert torch.equal(torch.rand(3, generator=first), drawn)
    assert saved.restore()
    assert not saved.restore()
    assert torch.equal(torch.rand(3, generator=moved), drawn)


def test_the_states_of_the_process_go_back() -> None:
    before = RandomState.now(touched=True)
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    before.restore()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == drawn
    set_random_state({"cpu": before.cpu, "python": before.python, "numpy": before.numpy})
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == drawn
