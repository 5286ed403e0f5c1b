"""What the guards of one call cost: 100 Linear layers (200 parameters) under AdamW.

Run on one pinned core: `OMP_NUM_THREADS=1 taskset -c 1 .venv/bin/python benchmarks/guards.py`. The figure is the
minimum over many short runs of everything a call does besides running the program.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import monograph as mg


class TrainStep(mg.Graph):
    """A step over a deep stack of small layers."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        """One step."""
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def microseconds(function: Callable[[], object], runs: int = 200, repeats: int = 30) -> tuple[float, float]:
    """Minimum and median of the mean time of one call, in microseconds of CPU time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(runs):
            function()
        times.append((time.process_time() - start) / runs * 1e6)
    return min(times), statistics.median(times)


def main() -> None:
    """Measure and print."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    step = TrainStep(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(8, 4)
    for _ in range(3):
        step(x)
    build = step.builds[0]
    call = mg.graph.read_call((x,), {}, ("x",))
    parts: dict[str, Callable[[], object]] = {
        "guards": build.guards.hold,
        "guards, signature, key and binding": lambda: step._build_for(
            mg.graph.read_call((x,), {}, ("x",)), (x,), {}
        ),
        "signature": lambda: mg.graph.read_call((x,), {}, ("x",)),
        "key": lambda: step._key(call),
        "binding": lambda: build.executor.bind(call.leaves),
    }
    print(f"torch {torch.__version__}, {len(build.guards.tensors)} state tensors, {len(step.builds)} build")
    for name, function in parts.items():
        low, middle = microseconds(function)
        print(f"{name:40} min {low:7.1f} µs   median {middle:7.1f} µs")


if __name__ == "__main__":
    main()
