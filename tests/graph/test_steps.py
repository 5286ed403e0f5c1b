"""graph.steps: how many steps are done, also after a resume."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg

X, Y = torch.ones(4, 3), torch.zeros(4, 2)


def step_of(**options: object) -> mg.Graph:
    model = nn.Linear(3, 2)
    return mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_each_call_counts() -> None:
    step = step_of()
    assert step.steps == 0
    step.compile(X, Y)
    assert step.steps == 0
    step(X, Y)
    step.eager(X, Y)
    assert step.steps == 2
    step.many(torch.stack([X] * 3), torch.stack([Y] * 3))
    assert step.steps == 5
    assert step.verify(X, Y).ok
    with pytest.raises(mg.MonographError):
        step(X, Y, Y)
    assert step.steps == 5


def test_micro_batches_are_one_step() -> None:
    step = step_of()
    step.config.set_gradient_accumulation_steps(2)
    step(X, Y)
    assert step.steps == 1


def test_a_step_without_an_optimizer_counts() -> None:
    double = mg.trace(lambda x: x * 2)
    double(X)
    double(X[:1])
    assert double.steps == 2


def test_a_skipped_update_is_a_step() -> None:
    step = step_of()
    step.set_grad_scaler(torch.amp.GradScaler("cpu"))
    before = step.model.weight.detach().clone()
    step(X * float("inf"), Y)
    assert torch.equal(step.model.weight, before)
    assert step.steps == 1


def test_a_step_that_failed_is_none() -> None:
    step = step_of()
    step.config.detect_nonfinite()
    step(X, Y)
    with pytest.raises(mg.NonfiniteError):
        step(X * float("nan"), Y)
    assert step.steps == 1


def test_it_goes_on_after_a_resume(tmp_path: Path) -> None:
    step = step_of()
    for _ in range(3):
        step(X, Y)
    mg.save(step.state_dict(), tmp_path / "checkpoint")
    again = step_of()
    again.load_state_dict(mg.load(tmp_path / "checkpoint"))
    assert again.steps == 3
    again(X, Y)
    assert again.state_dict()["graph.steps"] == again.steps == 4
    assert copy.deepcopy(step).steps == pickle.loads(pickle.dumps(step)).steps == 3


def test_build_cannot_read_it() -> None:
    class Reads(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.steps

    for run in (Reads(), Reads().eager):
        with pytest.raises(mg.CaptureError, match="build\\(\\) reads steps") as caught:
            run(X)
        assert caught.value.where.file == __file__


def test_an_attribute_of_that_name_is_the_users() -> None:
    class Own(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 10

        def build(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return x * self.steps

    own = Own()
    assert [own(X)[0, 0].item() for _ in range(3)] == [11, 12, 13]
    assert own.steps == 13
    assert own.state_dict()["graph.steps"] == 3
