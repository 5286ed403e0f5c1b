"""detect_nonfinite: a step that makes a NaN does not change the state, and says which op it was."""

from __future__ import annotations

import copy
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import decomposition

import monograph as mg
from monograph.backends.python import generated as aten_backend
from monograph.backends.python import two_parts
from monograph.numerics.judge import digests
from tests.inspect import faults
from tests.inspect.faults import Step, Through, batch, line_of
from tests.support import new_cache
from tests.support.choice import only_quick


def state_of(graph: Any) -> dict[str, str]:
    """All of it, random numbers too."""
    return digests(graph.state_dict())


@pytest.mark.one_case
@pytest.mark.parametrize("compiled", [False, True])
def test_the_state_is_that_of_before_the_step(compiled: bool) -> None:
    step = Step(compiled=compiled)
    step.config.detect_nonfinite()
    x, y = batch()
    for _ in range(2):
        step(x, y)
    before = state_of(step)
    bad = x.clone()
    bad[0, 0] = float("inf")
    with pytest.raises(mg.NonfiniteError, match="step 2 of the graph, counted from 0, made a NaN") as caught:
        step(bad, y)
    assert "the first" in str(caught.value)
    assert state_of(step) == before
    step(x, y)
    assert step.is_compiled
    assert len(step.builds) == 1
    assert state_of(step) != before


@pytest.mark.one_case
@pytest.mark.parametrize("compiled", [False, True])
def test_finite_steps_have_the_same_bits_as_without(compiled: bool) -> None:
    one, other = Step(compiled=compiled), Step(compiled=compiled)
    x, y = batch()
    other.config.detect_nonfinite()
    for number in range(3):
        torch.manual_seed(number)
        expected = one(x, y)
        torch.manual_seed(number)
        assert torch.equal(other(x, y), expected)
    assert digests(one.model.state_dict()) == digests(other.model.state_dict())
    assert "gate_nonfinite" in [stage.name for stage in other.builds[0].stages]


def test_a_first_step_leaves_no_optimizer_state() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(8, 4), batch()
    counterpart = copy.deepcopy(model)
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, counterpart))
    step = mg.train_graph(model, nn.CrossEntropyLoss(), ours)
    step.config.detect_nonfinite()
    for _ in range(2):
        with pytest.raises(mg.NonfiniteError):
            step(x / 0.0, y)
        assert not ours.state
    for _ in range(2):
        step(x, y)
        theirs.zero_grad()
        nn.functional.cross_entropy(counterpart(x), y).backward()
        theirs.step()
    with pytest.raises(mg.NonfiniteError):
        step(x / 0.0, y)
    assert digests(ours.state_dict()) == digests(theirs.state_dict())
    assert digests(model.state_dict()) == digests(counterpart.state_dict())


def test_the_line_is_named() -> None:
    step = Step(Through(faults.log_of_zero))
    step.config.detect_nonfinite()
    with pytest.raises(mg.NonfiniteError) as caught:
        step(*batch())
    assert caught.value.where.line == line_of("log")
    assert caught.value.where.module == "model.inner"
    step.config.detect_nonfinite(False)
    step(*batch())


def test_infinities_on_purpose_are_none() -> None:
    class Masked(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.add_optimizer(torch.optim.SGD(self.fc.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> Any:
            scores = self.fc(x).masked_fill(torch.eye(4).bool(), float("-inf"))
            loss = -scores.softmax(-1).clamp_min(1e-3).log().mean()
            loss.backward()
            return loss, scores

    graph = Masked()
    graph.config.detect_nonfinite()
    x = torch.randn(4, 4)
    graph(x)
    assert graph.find_nonfinite(x).ok


def test_state_that_held_an_infinity_may_hold_one() -> None:
    class Least(mg.Graph):
        """The least number so far, which begins with an infinity, and a mask that is made of infinities."""

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.register_buffer("least", torch.full((2,), float("inf")))
            self.model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def build(self, x: torch.Tensor) -> None:
            self.model.least.copy_(self.model.least.minimum(x))
            self.model.mask.mul_(2)

    graph, x = Least(), torch.tensor([1.0, 2.0])
    graph.config.detect_nonfinite()
    graph(torch.tensor([1.0, float("inf")]))
    assert graph.model.least.tolist() == [1.0, float("inf")]
    graph(x)
    assert graph.model.least.tolist() == [1.0, 2.0]
    with pytest.raises(mg.NonfiniteError):
        graph(torch.tensor([float("-inf"), 2.0]))
    assert graph.model.least.tolist() == [1.0, 2.0]
    assert graph.model.mask.tolist() == [0.0, float("-inf")]


def test_micro_batches() -> None:
    step = Step()
    step.config.detect_nonfinite()
    step.config.set_gradient_accumulation_steps(2)
    x, y = batch()
    step(x, y)
    before = state_of(step)
    x = x.clone()
    x[5, 0] = float("nan")
    with pytest.raises(mg.NonfiniteError):
        step(x, y)
    assert state_of(step) == before


def test_a_scaler_that_skips_is_left_alone() -> None:
    class Large(Step):
        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(x), y) * 1e25
            loss.backward()
            return loss

    step = Large()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    step.set_grad_scaler(scaler)
    step.config.detect_nonfinite()
    step(*batch())
    step(*batch())
    assert scaler.get_scale() < 2.0**60


def plant_in_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of tanh divides by zero where the backend calls it."""
    right, ops = aten_backend.direct_call, [torch.ops.aten.tanh.default, torch.ops.aten.tanh.out]
    for place in (aten_backend, two_parts):
        monkeypatch.setattr(place, "entries", lambda calls: {})
    monkeypatch.setattr(
        aten_backend,
        "direct_call",
        lambda t: (lambda x, **out: right(t)(x, **out).div_(0.0)) if t in ops else right(t),
    )


def plant_in_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in compiled code."""
    table = decomposition.decompositions
    monkeypatch.setitem(table, torch.ops.aten.tanh.default, lambda x: torch.sin(x) / 0.0)


@pytest.mark.parametrize("plant", only_quick([plant_in_aten, plant_in_inductor], plant_in_aten))
def test_only_in_the_kernels(plant: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    plant(monkeypatch)
    step = Step(compiled=plant is plant_in_inductor)
    step.config.detect_nonfinite()
    with pytest.raises(mg.NonfiniteError, match="op by op the same step is finite") as caught:
        step(*batch())
    assert (caught.value.where.line, caught.value.where.module) == (line_of("gate"), "model.first")


class Added(mg.Graph):
    """Micro-batches by hand, whose gradients stay."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.add_optimizer(optimizer, manual=True)
        self.optimizer = optimizer
        self.config.keep_gradients()
        self.config.detect_nonfinite()

    def build(self, x: torch.Tensor, update: bool) -> torch.Tensor:
        loss = self.model(x).square().sum(1).sqrt().mean()  # its gradient at 0 is a NaN
        loss.backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_gradient_that_stays_counts(bad: int) -> None:
    """At the micro-batch that makes it: a later one could only say that it came in."""
    torch.manual_seed(0)
    step = Added(nn.Linear(4, 3, bias=False))
    for number in range(3):
        if number == bad:
            before = {key: item for key, item in state_of(step).items() if "/programs" not in key}
            with pytest.raises(mg.NonfiniteError) as caught:
                step(torch.zeros(2, 4), number == 2)
            where = caught.value.where
            assert "square().sum(1)" in linecache.getline(where.file, where.line)
            assert {key: item for key, item in state_of(step).items() if "/programs" not in key} == before
        else:
            step(torch.randn(2, 4), number == 2)
    step(torch.randn(2, 4), True)
    assert torch.isfinite(step.model.weight).all()
