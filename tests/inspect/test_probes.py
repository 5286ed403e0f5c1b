"""mg.probe: values from inside of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from tests.inspect.faults import batch


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = mg.probe("hidden", self.first(x).relu())
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: mg.probe("hidden gradient", gradient))
        return mg.probe("logits", self.second(hidden), keep="values")


class Step(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Probed()
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.5))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_statistics_of_each_step_without_a_retrace(backend: str) -> None:
    step, (x, y) = Step(), batch()
    step.config.backend(backend)
    expected = []
    for _ in range(5):
        hidden = step.model.first(x).relu()
        expected.append((hidden.mean().item(), hidden.std(correction=0).item(), hidden.max().item()))
        logits = step.model.second(hidden).detach()
        step(x, y)
    assert len(step.builds) == 1
    history = step.probes()["hidden"]
    assert history.steps == [0, 1, 2, 3, 4]
    found = history.statistics
    for number, (mean, std, high) in enumerate(expected):
        assert found["mean"][number].item() == pytest.approx(mean, rel=1e-5)
        assert found["std"][number].item() == pytest.approx(std, rel=1e-5)
        assert found["max"][number].item() == pytest.approx(high, rel=1e-5)
    assert found["nonfinite"].tolist() == [0] * 5
    torch.testing.assert_close(step.probes()["logits"].value, logits)
    assert step.probes()["logits"].steps == [4]
    assert len(step.probes()["hidden gradient"].statistics["norm"]) == 5
    assert "hidden: 5 steps" in str(step.probes())


def test_eager_steps_record_the_same() -> None:
    one, other = Step(), Step()
    x, y = batch()
    for _ in range(3):
        one(x, y)
        other.eager(x, y)
    for name in ("hidden", "hidden gradient"):
        ours, theirs = one.probes()[name], other.probes()[name]
        assert ours.steps == theirs.steps
        assert all(torch.equal(ours.statistics[what], theirs.statistics[what]) for what in ours.statistics)


def test_micro_batches_are_rows() -> None:
    step, (x, y) = Step(), batch()
    step.config.set_gradient_accumulation_steps(3)
    step(x, y)
    step(x, y)
    assert tuple(step.probes()["hidden"].statistics["mean"].shape) == (2, 3)
    assert tuple(step.probes()["logits"].value.shape) == (6, 4)


def test_several_probes_of_one_name_are_numbered() -> None:
    class Twice(mg.Graph):
        def build(self, x: Tensor) -> Tensor:
            mg.probe("x", x)
            return mg.probe("x", x * 2)

    graph = Twice()
    graph(torch.ones(3))
    assert set(graph.probes()) == {"x", "x#1"}
    assert graph.probes()["x#1"].statistics["mean"].tolist() == [2.0]


def test_verify_and_replay_leave_no_records() -> None:
    step, (x, y) = Step(), batch()
    step(x, y)
    step.verify(x, y, steps=3)
    step.replay(x, y).run()
    assert step.probes()["hidden"].steps == [0]


def test_probes_go_to_a_writer() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []
            self.histograms: list[tuple[str, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

        def add_histogram(self, name: str, values: Tensor, step: int) -> None:
            self.histograms.append((name, step))

    step, (x, y), writer = Step(), batch(), Writer()
    step(x, y)
    step(x, y)
    assert step.probes().to_tensorboard(writer) == 1
    step(x, y)
    assert step.probes().to_tensorboard(writer, after=1) == 2
    assert [number for name, _, number in writer.scalars if name == "hidden/mean"] == [0, 1, 2]
    assert writer.histograms == [("logits", 1), ("logits", 2)]


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(mg.CaptureError, match="probe"):
        mg.probe("x", 1.0)  # type: ignore[arg-type]
    with pytest.raises(mg.CaptureError, match="statistics"):
        mg.probe("x", torch.ones(1), keep="everything")
    x = torch.ones(1)
    assert mg.probe("x", x) is x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.vmap(lambda row: mg.probe("row", row * 2))(x),
        lambda x: torch.func.grad(lambda y: mg.probe("row", y * 2).sum())(x),
    ],
)
def test_inside_of_transforms_they_are_refused(function: Any) -> None:
    with pytest.raises(mg.CaptureError, match=r"inside of torch\.vmap or a transform"):
        mg.trace(function)(torch.ones(2, 3))


def test_in_branches_they_do_nothing() -> None:
    graph = mg.trace(
        lambda x: torch.cond(x.sum() > 0, lambda v: mg.probe("branch", v * 2), lambda v: v - 1, (x,))
    )
    assert torch.equal(graph(torch.ones(2)), torch.full((2,), 2.0))
    assert graph.probes() == {}
