"""Python's collector of cycles has the thresholds of before after a capture, which it interrupts seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from monograph import Graph


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Step(Graph):
    def __init__(self, *, fails: bool = False, own: int = 0) -> None:
        super().__init__()
        self.fails, self.own = fails, own

    def build(self, x: torch.Tensor) -> torch.Tensor:
        if self.own:
            gc.set_threshold(self.own)
        if self.fails:
            raise ValueError("no step")
        return x * 2


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (90_000, 3, 3)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_the_thresholds_as_they_were(before: tuple[int, int, int], *, fails: bool) -> None:
    gc.set_threshold(*before)
    try:
        Step(fails=fails)(torch.ones(2))
    except ValueError:
        assert fails
    assert gc.get_threshold() == before


def test_a_threshold_that_build_sets_stays() -> None:
    Step(own=1234)(torch.ones(2))
    assert gc.get_threshold()[0] == 1234


def test_few_collections_interrupt_a_capture() -> None:
    gc.set_threshold(700, 10, 10)
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    class Many(Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            gc.callbacks.append(note)
            made: list[list[int]] = [[] for _ in range(5_000)]
            gc.callbacks.remove(note)
            return x * len(made)

    Many()(torch.ones(1))
    assert not phases
