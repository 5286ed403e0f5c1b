"""Measure an artifact of MobileNetV2: its size, and the first inference in new processes, from the import of torch on.

`OMP_NUM_THREADS=1 python -m benchmarks.artifact`
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import monograph as mg
from examples.models.mobilenet_v2 import MobileNetV2

FIRST = """
import sys, time
import torch
start = time.perf_counter()
import monograph as mg
imported = time.perf_counter()
mg.load(sys.argv[1])(torch.ones(1, 3, 224, 224))
print(imported - start, time.perf_counter() - imported)
"""


class Infer(mg.Graph):
    """The inference of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Tensor) -> Tensor:
        """Give the scores of images."""
        return self.model(x)


def main() -> None:
    """Measure and print the figures."""
    graph = Infer(MobileNetV2(num_classes=1000).eval())
    with torch.no_grad():
        graph.compile(mg.spec((mg.Dim("batch", max=32), 3, 224, 224), torch.float32))
    tensors = sum(item.nbytes for item in graph.model.state_dict().values())
    with tempfile.TemporaryDirectory() as folder:
        path = mg.save(graph, Path(folder) / "model")
        size = sum(file.stat().st_size for file in path.iterdir())
        print(f"size: {size} bytes, {size / tensors:.3f} of the tensors")
        command = [sys.executable, "-c", FIRST, str(path)]
        texts = [subprocess.run(command, capture_output=True, check=True, text=True).stdout for _ in range(6)]
    runs = [tuple(map(float, text.split())) for text in texts[1:]]
    for name, seconds in zip(
        ("import monograph", "load and first inference"), zip(*runs, strict=True), strict=True
    ):
        low, high = min(seconds), max(seconds)
        print(
            f"{name}: median {statistics.median(seconds):.2f} s, {low:.2f} to {high:.2f} s in {len(runs)} processes"
        )


if __name__ == "__main__":
    main()
