"""How fast the machine multiplies two large matrices: the roofline of every step."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

SIDES = (1024, 2048)
SMOKE_SIDES = (128,)
REPEATS = 8


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
