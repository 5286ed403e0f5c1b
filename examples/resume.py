"""Gradients of four parts, averaged weights, a schedule, and a run that stops and goes on: the same bits as without the stop.

Run it with `python examples/resume.py`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import monograph as mg


class Train(mg.Graph):
    """One call is one mini-batch and one update; build() sees a quarter of it."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60))
        self.add_ema(self.model, decay=0.95)
        self.config.set_gradient_accumulation_steps(4)

    def build(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss


def train(folder, data, until):
    """Go on from the newest checkpoint of the folder, if there is one."""
    torch.manual_seed(0)
    step = Train()
    checkpoints = mg.CheckpointManager(folder, keep=2)
    first = 0
    if (newest := checkpoints.latest()) is not None:
        step.load_state_dict(mg.load(newest))
        first = step.steps
        print(f"going on after step {first}")
    for number in range(first, until):
        losses = step(*data[number % len(data)])  # one for each part
        if (number + 1) % 10 == 0:
            checkpoints.save(step.state_dict(), step=number + 1)
    print(f"step {until}: loss {losses.mean().item():.4f}")
    return step


def main(steps=60):
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    y = x.square().mean(1, keepdim=True)
    data = list(zip(x.split(64), y.split(64), strict=True))
    with TemporaryDirectory() as folder:
        whole = train(Path(folder, "whole"), data, steps)
        train(Path(folder, "stopped"), data, steps // 2 + 5)  # what came after step 30 is lost
        resumed = train(Path(folder, "stopped"), data, steps)
    with whole.ema_weights(), resumed.ema_weights():
        same = all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
        whole.model.eval()
        with torch.no_grad():
            error = nn.functional.mse_loss(whole.model(x), y)
    print(f"the averaged weights have the same bits: {same}; their error is {error:.4f}")
    return same


if __name__ == "__main__":
    main()
