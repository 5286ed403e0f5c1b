"""Metrics of torchmetrics in build(): an update is part of the step, and what is more says what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from lightning_utilities.core import imports
from torch import nn
from torchmetrics import classification

import monograph as mg
from tests.support.steps import line_of

Y = torch.tensor([0, 2, 1, 1])
Use = Callable[[Any, torch.Tensor], Any]


class Measured(mg.Graph):
    """A training step that uses a metric in some way."""

    def __init__(self, metric: Any, use: Use) -> None:
        super().__init__()
        self.model, self.metric, self.use = nn.Linear(3, 3), metric, use
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.0))

    def build(self, x: torch.Tensor) -> Any:
        out = self.model(x)
        out.square().mean().backward()
        return self.use(self.metric, out.detach())


def called(metric: Any, x: torch.Tensor) -> Any:
    return metric(x, Y)  # at: the call


def updated(metric: Any, x: torch.Tensor) -> None:
    metric.update(x, Y)  # at: the update


def computed(metric: Any, x: torch.Tensor) -> Any:
    metric.update(x, Y)
    return metric.compute()  # at: the computing


def averaged(metric: Any, x: torch.Tensor) -> None:
    metric.update(x.mean())  # at: the mean


@pytest.fixture(autouse=True)
def _used_before() -> None:
    """A metric finds out at its first use which packages there are."""
    classification.MulticlassAccuracy(num_classes=3)(torch.randn(4, 3), Y)


MATTHEWS = classification.MulticlassMatthewsCorrCoef
UPDATE = "in build() write its update(pred, y)"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "use", "at", "written"),
    [
        (lambda: MATTHEWS(num_classes=3), called, "the call", f"calls a metric, which computes the value of the batch: {UPDATE}"),
        (lambda: MATTHEWS(num_classes=3), computed, "the computing", f"computes a metric: {UPDATE} alone"),
        (lambda: classification.MulticlassAUROC(num_classes=3), updated, "the update", "updates a metric that looks at values: return the"),
        (torchmetrics.MeanMetric, averaged, "the mean", 'nan_strategy="disable" does not'),
        (
            lambda: torchmetrics.MetricCollection(
                [classification.MulticlassAccuracy(num_classes=3), classification.MulticlassF1Score(num_classes=3)]
            ),
            updated,
            "the update",
            "MetricCollection(..., compute_groups=False) does not",
        ),
    ],
    ids=["call", "compute", "values", "NaNs", "collection"],
)  # fmt: skip
def test_a_metric_that_is_refused_says_what_to_write(
    make: Callable[[], Any], use: Use, at: str, written: str
) -> None:
    with pytest.raises(mg.DataDependentError) as caught:
        Measured(make(), use)(torch.randn(4, 3))
    assert caught.value.hint.startswith(f"test_metrics.py:{line_of(at, __file__)} ")
    assert written in caught.value.hint


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("use", "written"),
    [
        (
            called,
            "in build() metric.update(pred, y) has one build, and metric.compute() belongs after the step",
        ),
        (computed, "metric.compute() keeps what it gives, until the next update: call it after the step"),
    ],
)
def test_a_metric_that_is_called_has_another_build(use: Use, written: str) -> None:
    graph = Measured(classification.MulticlassAccuracy(num_classes=3), use)
    for _ in range(3):
        graph(torch.randn(4, 3))
    assert len(graph.builds) == 2
    assert written in graph.builds[1].reason.advice


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: MATTHEWS(num_classes=3), updated),
        (lambda: torchmetrics.MeanMetric(nan_strategy="disable"), averaged),
        (
            lambda: torchmetrics.MetricCollection(
                [classification.MulticlassAccuracy(num_classes=3), MATTHEWS(num_classes=3)],
                compute_groups=False,
            ),
            updated,
        ),
    ],
    ids=["update", "NaNs", "collection"],
)
def test_what_is_written_then_has_one_build_and_the_value(make: Callable[[], Any], use: Use) -> None:
    plain, graph = make(), Measured(make(), use)
    for _ in range(3):
        x = torch.randn(4, 3)
        use(plain, graph.model(x).detach())
        graph(x)
    assert len(graph.builds) == 1
    assert graph.metric.compute() == plain.compute()


def test_the_first_use_of_a_library_costs_one_build(caplog: pytest.LogCaptureFixture) -> None:
    """It finds out which packages there are, in caches of functions and in attributes of an object of its own."""
    asked = torchmetrics.utilities.data._XLA_AVAILABLE
    for name in ("available", "message"):
        vars(asked).pop(name, None)
    imports.module_available.cache_clear()
    imports.package_available.cache_clear()
    step = Measured(classification.MulticlassAccuracy(num_classes=3), updated)
    for _ in range(3):
        step(torch.randn(4, 3))
    assert len(step.builds) == 2
    assert "_XLA_AVAILABLE.available at its first use: this costs one build" in caplog.text
    assert "captured anew" not in caplog.text
