"""A script for torchrun: trains with DDP, and goes on from the newest checkpoint. One rank is killed once, if asked."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monograph as mg

STEPS = 8


def main(folder: Path, killed_at: int) -> None:
    """Save after each second step, and what the last gave as `result-RANK`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    checkpoints = mg.CheckpointManager(folder / "steps", every=2)
    start = 0
    if (newest := checkpoints.latest()) is not None:
        state = mg.load(newest)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        start = state["step"]
    for step in range(start, STEPS):
        if step == killed_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        checkpoints.save(state | {"random": torch.get_rng_state()}, step=step + 1)
    mg.save({"start": start, "model": model.state_dict()}, folder / f"result-{rank}", together=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
