"""The smallest training step: what `make check` runs on every change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import Side, assert_same, train_eagerly


class TrainStep(mg.Graph):
    def __init__(self, side: Side) -> None:
        super().__init__()
        self.model = side.model
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler)

    def build(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def make_side() -> Side:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Side(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))


def batches(count: int = 4):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.quick
def test_a_step_is_bitwise_eager():
    eager, graph = make_side(), make_side()
    torch.manual_seed(1)
    expected = train_eagerly(eager, lambda model, x, y: nn.functional.cross_entropy(model(x), y), batches())
    step = TrainStep(graph)
    torch.manual_seed(1)
    for batch, state in zip(batches(), expected, strict=True):
        loss = step(*batch)
        assert_same(state, {"loss": loss, **graph.state()})
    assert len(step.builds) == 1


@pytest.mark.quick
def test_the_printed_program_runs():
    step = TrainStep(make_side())
    x, y = batches(1)[0]
    step.compile(x, y)
    build = step.builds[0]
    scope: dict = {}
    exec(step.show(), scope)
    inputs = build.executor.bind((x, y))
    torch.manual_seed(2)
    pasted = scope[build.program.name](*inputs)
    torch.manual_seed(2)
    loss = step(x, y)
    assert_same(loss, pasted[0])
