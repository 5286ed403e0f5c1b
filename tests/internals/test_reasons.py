"""Reasons for builds name all that has changed, in words, and the line of the user's that has to do with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.ir.call.reason import Reason
from tests.support.steps import line_of


def x(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (4, 8)))


class Several(mg.Graph):
    """A step that reads some numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.drop, self.scale, self.k, self.label = nn.Linear(8, 8), 0.1, 1.0, 1, "a"
        self.other = "b"
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.backend("aten")

    def build(self, x: torch.Tensor, written: bool = False) -> torch.Tensor:
        out = nn.functional.dropout(self.model(x), self.drop) * self.scale  # at: rate
        if written:
            out = out * len(json.dumps(self.k))  # at: written
        loss = out.square().mean() * len(self.label + self.other)
        loss.backward()
        return loss


def reasons_of(graph: mg.Graph, *args: Any, **changes: Any) -> Reason:
    for name, value in changes.items():
        setattr(graph, name, value)
    graph(*args)
    return graph.builds[-1].reason


def test_all_that_has_changed_is_named() -> None:
    graph = Several()
    graph(x(), True)
    reason = reasons_of(graph, x(), True, scale=2.0, drop=0.2)
    assert sorted(reason.split("; ")) == [
        "graph.drop changed from 0.1 to 0.2",
        "graph.scale changed from 1.0 to 2.0",
    ]
    reason = reasons_of(graph, x(), True, scale=3.0, drop=0.3, k=2, label="bb", other="c")
    assert len(graph.builds) == 3
    assert sum(f"graph.{name} changed from " in reason for name in ("drop", "k", "label", "other")) == 3
    assert reason.endswith("; and 1 more")
    reason = reasons_of(graph, x(), True, drop=0.4)
    assert reason == "graph.drop changed from 0.3 to 0.4"
    assert "same(" not in graph.explain()
    assert "graph.drop = 0.4" in graph.explain()


def test_settings_and_modes_that_have_changed_are_all_named() -> None:
    graph = Several()
    graph(x())
    graph.config.enable_amp()
    graph.config.detect_nonfinite()
    reason = reasons_of(graph, x())
    assert "amp=torch.bfloat16" in reason
    assert "nonfinite" in reason
    assert reason.count("the configuration changed") == 2


def test_the_line_that_needs_a_number_is_named() -> None:
    graph = Several()
    graph(x())
    for rate in (0.2, 0.3):
        reason = reasons_of(graph, x(), drop=rate)
        assert f"test_reasons.py:{line_of('rate', __file__)} needs the number itself" in reason.advice


def test_a_number_is_not_blamed_for_another_one() -> None:
    graph = Several()
    graph(x(), True)
    reason = reasons_of(graph, x(), True, scale=2.0, k=2)
    assert "graph.scale" in reason
    assert "needs the number itself" not in reason.advice
    assert f"test_reasons.py:{line_of('written', __file__)}: TypeError: " in reason.advice


def test_with_accumulation_numbers_stay_what_they_are() -> None:
    graph = Several()
    graph.config.set_gradient_accumulation_steps(2)
    graph(x())
    reason = reasons_of(graph, x(), scale=2.0)
    assert "needs the number itself" not in reason.advice
    assert "numbers stay what they are in this build (gradients are accumulated)" in reason.advice


class Caching(nn.Module):
    """A layer that keeps what it has made for a number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table, self.scale = nn.Linear(8, 8), None, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] != x.shape[0]:
            self.table = torch.arange(float(x.shape[0]))[:, None]  # at: table
        return self.inner(x) * self.scale + self.table  # type: ignore[no-any-return]


def test_the_line_of_the_step_that_has_written_a_value_is_named() -> None:
    model = Caching()
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend("aten")
    for rows in (4, 4, 5, 6, 7):
        step(x(rows, 8), x(rows, 8))
    wrote = f"test_reasons.py:{line_of('table', __file__)} writes"
    reasons = [build.reason for build in step.builds if "table" in build.reason]
    assert reasons[0].startswith("model.table changed from None to a tensor of shape (4, 1), which ")
    assert all(wrote in reason for reason in reasons)
    step.model.scale = 2.0  # written here, and by no step
    step(x(rows, 8), x(rows, 8))
    assert step.builds[-1].reason.endswith("; model.scale changed from 1.0 to 2.0")


class Scaled(mg.Graph):
    """An int changes with the lengths, one after the other."""

    def build(self, x: torch.Tensor, step: int, name: str) -> torch.Tensor:
        return x.mean(1) * (1 + 0.1 * step) + len(name)


@pytest.mark.parametrize("is_declared", [True, False])
def test_sizes_of_a_build_for_any_size_are_no_reason(is_declared: bool) -> None:
    graph = Scaled()
    if is_declared:
        graph.config.dynamic("x", 1)
    for step, length in enumerate((8, 15, 9, 20)):
        graph(x(4, length), step // 2, "a")
    graph(x(4, 30), 5, "long")
    sizes = [] if is_declared else ["argument x is a tensor (4, 15) float32 on cpu"]
    expected = ["first call", *sizes, "argument step is 1 (int)", "argument name is 'long' (str)"]
    assert [str(build.reason).partition(";")[0] for build in graph.builds] == expected


class Branches(mg.Graph):
    """Two numbers move, and one of them decides on a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.epoch = 1.0, 0

    def build(self, x: torch.Tensor) -> torch.Tensor:
        out = (x * self.temperature).sum()
        return out * 2 if self.epoch >= 4 else out


@pytest.mark.parametrize("sizes", [(64,), (64, 64), (64, 40), (64, 40, 1)])
def test_the_reason_is_what_keeps_the_build_that_nearly_serves(sizes: tuple[int, ...]) -> None:
    """Others, such as the first one for each size, differ in numbers too that move since."""
    graph = Branches()
    for epoch in range(4):
        graph.temperature, graph.epoch = 1.0 + epoch, epoch
        for size in sizes:
            graph(torch.ones(size))
    built = len(graph.builds)
    graph.temperature, graph.epoch = 9.0, 4
    graph(torch.ones(sizes[0]))
    assert len(graph.builds) == built + 1
    assert graph.builds[-1].reason == "the branch `graph.epoch < 4` is no longer taken"
