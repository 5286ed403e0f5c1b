"""A process that trains models as graphs and saves each: `python -m tests.artifact.saving DIRECTORY NAME...`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import monograph as mg
from tests.artifact.plain import BEFORE, WORKLOADS, Setup, Workload, batches, inputs


class Train(mg.Graph):
    """A whole step."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        super().__init__()
        self.model = setup.model
        self.workload = workload
        self.add_optimizer(setup.optimizer, lr_sch=setup.scheduler)

    def build(self, x, y):
        loss = self.workload.loss(self.model, x, y)
        loss.backward()
        if self.workload.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.clip)
        return loss


class Infer(mg.Graph):
    """Inference."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def build(self, x):
        return self.net(x)


def save(name: str, directory: Path) -> None:
    """Train some steps, and save training and inference over one state."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    setup = workload.make()
    train = Train(workload, setup)
    for x, y in batches(name)[:BEFORE]:
        train(x, y)
    setup.model.eval()
    infer = Infer(setup.model)
    example = inputs(name, 4)
    with torch.no_grad():
        infer.compile(mg.spec((mg.Dim("batch", max=16), *example.shape[1:]), example.dtype))
    setup.model.train()
    mg.save({"train": train, "infer": infer}, directory / name)
    assert setup.model.training, "saving left another mode"


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for name in names:
        save(name, Path(folder))
