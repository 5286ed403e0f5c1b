"""How fast the machine multiplies large matrices and copies memory: the roofline of every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

SIDES = (1024, 2048)
SMOKE_SIDES = (128,)
REPEATS = 8
_COPIED = 2**27  # bytes


def gemm_flops_per_second(*, smoke: bool = False) -> dict[str, float]:
    """The best of several products of square float32 matrices, for each library that PyTorch has."""
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch.mm": torch.mm}
    if torch.backends.mkldnn.is_available():
        ways["oneDNN"] = onednn_product
    sides = SMOKE_SIDES if smoke else SIDES
    return {name: max(best_speed(product, side) for side in sides) for name, product in ways.items()}


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` by oneDNN."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return result


def best_speed(product: Callable[[Tensor, Tensor], Tensor], side: int) -> float:
    """Floating point operations per second in the fastest of some products."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        product(a, b)
        seconds.append(perf_counter() - start)
    return 2 * side**3 / min(seconds)


@dataclass(frozen=True)
class Roofline:
    """What the machine can do: arithmetic at most, and memory at most."""

    flops_per_second: float
    bytes_per_second: float

    def least_seconds(self, flops: int, nbytes: int) -> float:
        """How long work takes at least; caches may beat the memory for small tensors."""
        return max(flops / self.flops_per_second, nbytes / self.bytes_per_second)

    def __str__(self) -> str:
        return (
            f"roofline, measured just now on {torch.get_num_threads()} thread(s): "
            f"{self.flops_per_second / 1e9:.0f} GFLOP/s in float32, {self.bytes_per_second / 1e9:.1f} GB/s"
        )


def measured_roofline() -> Roofline:
    """Products of large matrices, and copies of memory that no cache holds."""
    source = torch.zeros(_COPIED // 4)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - start)
    speeds = {side: best_speed(torch.mm, side) for side in SIDES[:1]}
    return Roofline(max(speeds.values()), 2 * _COPIED / min(seconds))
