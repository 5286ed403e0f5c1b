"""profile(): sums that fit, work that is counted, a trace that nests."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from tests.inspect.faults import Step, batch


class Product(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(256, 512)

    def build(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_sums_fit() -> None:
    profile = Step().profile(*batch())
    assert profile.seconds == pytest.approx(sum(group.seconds for group in profile.by_phase()))
    assert profile.seconds == pytest.approx(sum(group.seconds for group in profile.by_op()))
    modules = {group.name: group for group in profile.by_module()}
    inside = modules["model.first"].seconds + modules["model.second"].seconds + modules["model.head"].seconds
    assert inside <= modules["model"].seconds
    assert {group.name for group in profile.by_phase()} == {"forward", "backward", "update"}
    assert "of the roofline" in str(profile)


class Two(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.add_optimizer(torch.optim.SGD(self.fc.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        y = self.fc(x).tanh()
        loss = (y - x).square().mean()
        loss.backward()
        return loss


def test_lines_of_the_model_have_their_backward() -> None:
    profile = Two().profile(torch.randn(4, 8))
    first = inspect.getsourcelines(Two)[1] + 7  # of the body of build
    lines = {group.name: group for group in profile.by_line()}
    assert set(lines) == {f"test_profile.py:{first + at}" for at in (0, 1, 2)}
    ops = [op.op for op in profile.ops if op.where.line == first and op.where.phase != "update"]
    assert {"addmm", "tanh", "tanh_backward", "mm"} <= set(ops)
    assert lines[f"test_profile.py:{first}"].count == len(ops)
    assert "line, with its backward" in str(profile)


def test_work_is_counted() -> None:
    profile = Product().profile(torch.randn(64, 256))
    (op,) = (op for op in profile.ops if op.op == "addmm")
    assert op.flops == 2 * 64 * 256 * 512
    assert op.nbytes == 4 * (64 * 256 + 256 * 512 + 512 + 64 * 512)
    assert 0 < op.share <= 1
    views = [op for op in profile.ops if op.op == "t"]
    assert all(op.nbytes == 0 for op in views)


def test_a_trace_nests(tmp_path: Path) -> None:
    profile = Step().profile(*batch())
    profile.trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    ops = [event for event in events if event["cat"] == "op"]
    assert len(ops) == len(profile.ops)
    open_: list[dict[str, float]] = []
    for event in events:
        while open_ and event["ts"] >= open_[-1]["ts"] + open_[-1]["dur"] - 1e-6:
            open_.pop()
        if open_:
            assert event["ts"] + event["dur"] <= open_[-1]["ts"] + open_[-1]["dur"] + 1e-3
        open_.append(event)
    with pytest.raises(mg.DefinitionError, match="JSON"):
        profile.trace(tmp_path / "step.txt")


def test_modules_are_named_in_traces_of_torch() -> None:
    step, (x, y) = Step(), batch()
    step(x, y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step(x, y)
    names = {event.name for event in seen.events()}
    assert "model.first.fc (forward)" in names
    assert "model.first.fc (backward)" in names


def test_what_a_compiled_step_shows() -> None:
    step = Step()
    step.config.backend("exact")
    assert "ops as captured, one by one; exact runs them as compiled code." in str(step.profile(*batch()))
    assert "as captured" not in str(Step().profile(*batch()))
