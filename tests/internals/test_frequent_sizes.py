"""Sizes that come often to a compiled step for all sizes: compiled for themselves, and kept if that is faster."""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.internals import frequent_sizes
from monograph.internals.internals import internals_of
from monograph.internals.upgrades import ToInductor, can_wait
from monograph.settings import Settings
from tests.support import assert_same


class Step(mg.Graph):
    def __init__(self, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters()))
        self.config.backend(backend)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


class Beside:
    """A graph, and eager mode on a copy of its model."""

    def __init__(self, backend: str = "aten", *, norm: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(4, 8), norm or nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.plain.parameters())
        self.step = Step(copy.deepcopy(self.plain), backend)
        self.seed = 0

    def run(self, rows: int, *, close: bool = False) -> None:
        self.seed += 1
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(self.seed))
        self.optimizer.zero_grad()
        expected = self.plain(x).square().mean()
        expected.backward()
        self.optimizer.step()
        got = self.step(x)
        if close:
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(dict(self.step.model.state_dict()), dict(self.plain.state_dict()))
        else:
            assert_same(expected.detach(), got.detach(), f"loss of step {self.seed}")
            assert_same(dict(self.plain.state_dict()), dict(self.step.model.state_dict()), "weights")

    @property
    def reasons(self) -> list[str]:
        return [str(build.reason) for build in self.step.builds]


@pytest.fixture
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on aten count as compiled ones that come often at once, and another process as done."""
    monkeypatch.setattr(frequent_sizes, "can_wait", lambda settings: True)
    monkeypatch.setattr(frequent_sizes, "LEAST", -1.0)
    monkeypatch.setattr(frequent_sizes, "max", lambda *numbers: min(numbers), raising=False)
    monkeypatch.setattr(ToInductor, "successor", lambda upgrade, build, step, leaves: build)


def test_a_size_that_comes_often_gets_a_build_of_its_own(
    compiled_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequent_sizes, "_FASTER", math.inf)
    beside = Beside()
    for rows in [3, 5, *[7] * 30, 5, 9, 7, 7]:
        beside.run(rows)
    assert len(beside.reasons) == 3
    assert beside.reasons[-1] == "steps at x.size(0) = 7 come often: they have a compiled step of their own"
    used = {build.number: build.executor.steps for build in beside.step.builds}
    assert used[0] == 1
    assert used[2] >= 12, "steps that were compared, and those after"
    assert sum(used.values()) == 36


def test_it_is_dropped_if_it_is_not_faster(compiled_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequent_sizes, "_FASTER", 0.0)
    beside = Beside()
    for rows in [3, 5, *[7] * 40]:
        beside.run(rows)
    assert len(beside.reasons) == 2
    frequent = internals_of(beside.step).upgrades.frequent[1]
    assert vars(frequent)["_candidates"][(torch.Size([7, 4]),)] is None, "and this is not tried again"


@pytest.mark.parametrize("steps_before", [2, 8, 30])
def test_state_that_is_replaced_meanwhile_is_that_of_the_next_step(
    compiled_at_once: None, monkeypatch: pytest.MonkeyPatch, steps_before: int
) -> None:
    monkeypatch.setattr(frequent_sizes, "_FASTER", math.inf)
    beside = Beside(norm=nn.BatchNorm1d(8))
    for rows in [3, 5, *[7] * steps_before]:
        beside.run(rows)
    for model in (beside.plain, beside.step.model):
        model[1].running_mean = torch.zeros(8)
    for rows in [*[7] * 30, 3, 5]:
        beside.run(rows)
    assert sum("come often" in reason for reason in beside.reasons) == 1, "bound to what is there now"


class Scaled(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config.backend("aten")

    def build(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        made: torch.Tensor = self.model(x) * factor
        return made


def test_ints_that_move_go_on_moving(compiled_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequent_sizes, "_FASTER", math.inf)
    model = nn.Linear(4, 2)
    step = Scaled(model)
    for factor, rows in enumerate([3, 5, 6, *[7] * 30]):
        x = torch.randn(rows, 4)
        assert_same((model(x) * factor).detach(), step(x, factor).detach(), f"factor {factor}")
    assert str(step.builds[-1].reason).startswith("steps at x.size(0) = 7 come often")
    assert step.builds[-1].executor.steps > 12


@pytest.mark.parametrize("limit", ["max_builds", "assert_max_builds", "recent"])
def test_no_build_is_made_that_is_not_permitted(
    compiled_at_once: None, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(frequent_sizes, "_FASTER", math.inf)
    beside = Beside()
    if limit != "assert_max_builds":
        beside.step.config.max_builds(2, keep="recent" if limit == "recent" else None)
    with mg.assert_max_builds(2 if limit == "assert_max_builds" else 9):
        for rows in [3, 5, *[7] * 30]:
            beside.run(rows)
    assert [build.number for build in beside.step.builds] == [0, 1]


def test_a_candidate_is_left_if_others_have_taken_the_last_place(
    compiled_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequent_sizes, "_FASTER", math.inf)
    beside = Beside()
    beside.step.config.max_builds(3)
    for rows in [3, 5, *[7] * 10]:
        beside.run(rows)
    beside.run(0)
    for rows in [7] * 30:
        beside.run(rows)
    assert len(beside.reasons) == 3
    assert "come often" not in beside.reasons[-1]


def test_what_was_declared_has_one_build(compiled_at_once: None) -> None:
    beside = Beside()
    beside.step.config.dynamic("x", 0)
    for rows in [3, 5, *[7] * 30]:
        beside.run(rows)
    assert len(beside.reasons) == 1


def test_a_candidate_that_fails_is_left(compiled_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise mg.BackendError("no compiler")

    monkeypatch.setattr(ToInductor, "successor", refuse)
    beside = Beside()
    for rows in [3, 5, *[7] * 10]:
        beside.run(rows)
    assert len(beside.reasons) == 2


@pytest.mark.long
def test_compiled_steps_for_all_sizes_and_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequent_sizes, "LEAST", 0.0)
    monkeypatch.setattr(frequent_sizes, "_FASTER", math.inf)
    beside = Beside("inductor")
    beside.run(3, close=True)
    beside.run(5, close=True)
    vars(internals_of(beside.step).upgrades.frequent[1])["_worth"] = 0.0
    for _ in range(60_000):  # until the other process has compiled, and for some steps by each
        beside.step(torch.randn(7, 4))
        if len(beside.reasons) == 3:
            break
        time.sleep(0.01)
    for rows in [5, 7, 9, 3]:
        assert beside.step.verify(torch.randn(rows, 4)).ok
    assert [build.backend for build in beside.step.builds] == ["inductor"] * 3
    assert beside.reasons[-1].startswith("steps at x.size(0) = 7 come often")


def test_deterministic_steps_are_compiled_once() -> None:
    compiled = Settings(backend="inductor")
    assert can_wait(compiled)
    torch.use_deterministic_algorithms(True)
    try:
        assert not can_wait(compiled)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not can_wait(Settings(backend="inductor", background=True)), "it waits for its own sake"
    assert not can_wait(Settings(backend="exact"))
