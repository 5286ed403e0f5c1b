"""What a checkpoint costs, against safetensors alone with a SHA-256 of the file and the same syncs.

Run on one pinned core: `OMP_NUM_THREADS=1 taskset -c 1 .venv/bin/python -m benchmarks.checkpoint`. The four are timed
in turn, each save to a path that does not exist yet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import monograph as mg

ROUNDS = 40


def large_state() -> dict[str, Any]:
    """About 100 MB in 26 tensors."""
    generator = torch.Generator().manual_seed(0)
    return {f"weight.{i}": torch.randn(1000, 1000, generator=generator) for i in range(26)}


def small_state() -> dict[str, Any]:
    """A model of 125 small layers and its AdamW: 250 parameters and 750 tensors of state, 250 of them counters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(125)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def tensors_of(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state by name, as a user of safetensors would list them."""
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            found |= tensors_of(value, f"{prefix}{key}/")
    return found


def save_plainly(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """The file with its hash, synced like a checkpoint: the file, the hash, the directory and its parent."""
    directory.mkdir()
    path = directory / "model.safetensors"
    save_file(tensors, path)
    sync(path)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    (directory / "sha256").write_text(digest)
    for other in (directory / "sha256", directory, directory.parent):
        sync(other)


def load_plainly(directory: Path) -> dict[str, torch.Tensor]:
    """The file, if its hash is right."""
    path = directory / "model.safetensors"
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == (directory / "sha256").read_text()
    return load_file(path)


def sync(path: Path) -> None:
    """Bring one file or directory to the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def milliseconds(function: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def measure(name: str, state: dict[str, Any], root: Path) -> None:
    """Time the four in turn and print the ratios of medians and of minima."""
    tensors = tensors_of(state)
    times: dict[str, list[float]] = {"save plainly": [], "save": [], "load plainly": [], "load": []}
    for _ in range(ROUNDS):
        plain, ours = root / "plain", root / "ours"
        times["save plainly"].append(milliseconds(partial(save_plainly, tensors, plain)))
        times["save"].append(milliseconds(partial(mg.save, state, ours)))
        times["load plainly"].append(milliseconds(partial(load_plainly, plain)))
        times["load"].append(milliseconds(partial(mg.load, ours)))
        shutil.rmtree(plain)
        shutil.rmtree(ours)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{name}: {len(tensors)} tensors, {num_bytes / 1e6:.1f} MB, {ROUNDS} rounds")
    for what, found in times.items():
        print(f"  {what:14} median {statistics.median(found):8.2f} ms   min {min(found):8.2f} ms")
    for what in ("save", "load"):
        ours_times, plain_times = times[what], times[f"{what} plainly"]
        middle = statistics.median(ours_times) / statistics.median(plain_times)
        print(f"  {what} ratio: median {middle:.2f}, min {min(ours_times) / min(plain_times):.2f}")


def main() -> None:
    """Measure and print."""
    print(f"torch {torch.__version__}, safetensors {safetensors.__version__}")
    root = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-"))
    try:
        measure("large", large_state(), root)
        measure("small", small_state(), root)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
