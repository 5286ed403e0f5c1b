"""The default backend on whole trainings: from the first step on `aten` to steps on `exact`, with the bits of eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monograph as mg
from benchmarks.workload import Workload, seeded_batches, seeded_model
from benchmarks.workloads import all_workloads
from tests.support import Side, assert_same
from tests.support.swaps import STEPS_BEFORE, swaps_soon, wait_for_compiler

__all__ = ["swaps_soon"]  # a fixture


class TrainStep(mg.Graph):
    """Forward, loss and backward."""

    def __init__(self, side: Side, workload: Workload) -> None:
        super().__init__()
        self.model, self.loss = side.model, workload.loss
        self.add_optimizer(side.optimizer)

    def build(self, *batch: torch.Tensor) -> torch.Tensor:
        *inputs, target = batch
        loss = self.loss(self.model(*inputs), target)
        loss.backward()
        return loss


def make_side(workload: Workload) -> Side:
    """The weights and the optimizer that a benchmark begins with."""
    model, update = seeded_model(workload), workload.update
    if update.kind == "adamw":
        return Side(
            model, torch.optim.AdamW(model.parameters(), lr=update.lr, weight_decay=update.weight_decay)
        )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=update.lr, momentum=update.momentum, weight_decay=update.weight_decay
    )
    return Side(model, optimizer)


@pytest.mark.long
@pytest.mark.usefixtures("swaps_soon")
@pytest.mark.parametrize("workload", all_workloads().values(), ids=list(all_workloads()))
def test_a_training_through_the_swap(workload: Workload) -> None:
    plain, side = make_side(workload), make_side(workload)
    step = TrainStep(side, workload)
    batches = seeded_batches(workload)
    backends = []
    for number in range(STEPS_BEFORE + 3):
        *inputs, target = batches[number % len(batches)]
        plain.optimizer.zero_grad()
        expected = workload.loss(plain.model(*inputs), target)
        expected.backward()
        plain.optimizer.step()
        assert_same(expected.detach(), step(*inputs, target), f"loss of step {number}")
        backends.append(step.backend)
        wait_for_compiler(step)
    assert_same(plain.state(), side.state(), "after the last step")
    assert backends[0] == "aten"
    assert backends[STEPS_BEFORE:] == ["exact"] * 3


@pytest.mark.usefixtures("swaps_soon")
def test_the_swap_in_autocast_of_the_caller() -> None:
    def make() -> Side:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        return Side(model, torch.optim.AdamW(model.parameters()))

    plain, side = make(), make()
    step = mg.train_graph(side.model, nn.CrossEntropyLoss(), side.optimizer)
    step.config.enable_amp(dtype=torch.bfloat16)
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    for number in range(STEPS_BEFORE + 2):
        with torch.autocast(
            "cpu", dtype=torch.float16
        ):  # an op that went through it again would round otherwise
            loss = step(x, y)
        plain.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = nn.functional.cross_entropy(plain.model(x), y)
        expected.backward()
        plain.optimizer.step()
        assert_same(expected.detach(), loss, f"loss of step {number}")
        wait_for_compiler(step)
    assert_same(plain.state(), side.state())
    assert step.backend == "exact"
