"""A graph with most of what a graph can have. `python -m tests.support.earlier FOLDER` writes files of it, to be read by later versions."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch
from torch import nn

import monograph as mg


class Step(mg.Graph):
    """A training step with mixed precision, a scheduler, averaged weights, dropout and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.2), nn.Linear(4, 2)
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(optimizer, 2))
        self.set_grad_scaler(torch.amp.GradScaler("cpu"))
        self.add_ema(self.model, 0.9)
        self.config.enable_amp()
        self.config.allow_fuse_cast_scale()

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def made() -> tuple[Step, torch.Tensor]:
    """The graph after two steps, and what it is called with."""
    torch.manual_seed(0)
    step, x = Step(), torch.arange(12.0).view(4, 3) / 12
    step(x), step(x)
    return step, x


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    step, x = made()
    (folder / "graph.pickle").write_bytes(pickle.dumps(step))
    mg.save(step.state_dict(), folder / "checkpoint.zip")
    mg.save(step, folder / "artifact.zip")
    (folder / "losses.json").write_text(json.dumps([step(x).item() for _ in range(2)]))


if __name__ == "__main__":
    main()
