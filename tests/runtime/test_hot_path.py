"""A call that a build serves passes few files of the package, and none again and again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import monograph as mg
from monograph.capture.guards import words

PACKAGE = f"{Path(mg.__file__).parent}/"
MOST_FILES, MOST_ENTRIES = 5, 2
needs_versions = pytest.mark.skipif(
    words.place_of_version({}) is None,
    reason="since Python 3.12 torch counts what happens to dicts itself, and guards ask it for each dict",
)


class Step(mg.Graph):
    """A common training step."""

    def __init__(self, backend: str, *, with_scheduler: bool) -> None:
        super().__init__()
        self.config.backend(backend)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.add_optimizer(optimizer, lr_sch=StepLR(optimizer, 1000) if with_scheduler else None)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def entered(run: Callable[[], object]) -> Counter[str]:
    """How often each file of the package is entered from another one while a function runs."""
    found: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != file:
            found[file.removeprefix(PACKAGE)] += 1

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@needs_versions
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("backend", "with_scheduler"), [("aten", False), ("aten", True), ("exact", True), ("inductor", True)]
)
def test_a_hit_passes_few_files(backend: str, with_scheduler: bool) -> None:
    step = Step(backend, with_scheduler=with_scheduler)
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    for _ in range(20):  # the first steps are looked at more closely, for mistakes
        step(x, y)
    found = entered(lambda: step(x, y))
    assert len(step.builds) == 1
    assert len(found) <= MOST_FILES, found
    assert max(found.values()) <= MOST_ENTRIES, found


@needs_versions
def test_a_hit_with_the_builds_of_two_shapes_passes_few_files() -> None:
    step = Step("aten", with_scheduler=False)
    calls = [(torch.randn(size, 8), torch.zeros(size, dtype=torch.int64)) for size in (4, 6)]
    for _ in range(20):
        for call in calls:
            step(*call)
    for call in calls:
        found = entered(lambda call=call: step(*call))  # type: ignore[misc]
        assert len(found) <= MOST_FILES, found
        assert max(found.values()) <= MOST_ENTRIES, found
