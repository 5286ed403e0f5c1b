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


def best_speed(
    product: Callable[[Tensor, Tensor], Tensor], side: int, device: torch.device | None = None
) -> float:
    """Floating point operations per second in the fastest of some products."""
    a, b = torch.ones(side, side, device=device), torch.ones(side, side, device=device)
    return 2 * side**3 / _least_seconds(lambda: product(a, b))


def wait_for(made: Tensor) -> None:
    """Wait until a device that works on its own has made a tensor."""
    if made.is_cuda:
        torch.cuda.synchronize(made.device)


def _least_seconds(run: Callable[[], Tensor]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        wait_for(run())
        seconds.append(perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Roofline:
    """What the machine can do: arithmetic at most, and memory at most."""

    flops_per_second: float
    bytes_per_second: float
    device: torch.device

    def least_seconds(self, flops: int, nbytes: int) -> float:
        """How long work takes at least; caches may beat the memory for small tensors."""
        return max(flops / self.flops_per_second, nbytes / self.bytes_per_second)

    def __str__(self) -> str:
        threads = f" on {torch.get_num_threads()} thread(s)" * (self.device.type == "cpu")
        return (
            f"roofline of {self.device}{threads}, measured just now: "
            f"{self.flops_per_second / 1e9:.0f} GFLOP/s in float32, {self.bytes_per_second / 1e9:.1f} GB/s"
        )


def measured_roofline(device: torch.device) -> Roofline:
    """Products of large matrices, and copies of memory that no cache holds."""
    source = torch.zeros(_COPIED // 4, device=device)
    target = torch.empty_like(source)
    seconds = _least_seconds(lambda: target.copy_(source))
    return Roofline(best_speed(torch.mm, SIDES[0], device), 2 * _COPIED / seconds, device)
