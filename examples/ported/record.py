"""What a script has computed, and when. `python -m benchmarks.ported` reads it and compares."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn

BACKEND = os.environ.get("PORTED_BACKEND", "auto")  # what the scripts of graph/ run on
clock: list[float] = []
losses: list[float] = []
models: list[nn.Module] = []


def begin() -> None:
    """Training begins."""
    clock.append(time.perf_counter())


def record(loss: Tensor) -> None:
    """A step is over."""
    losses.append(loss.detach().item())
    clock.append(time.perf_counter())


def final(*modules: nn.Module) -> None:
    """Training is over: these are trained."""
    models.extend(modules)
