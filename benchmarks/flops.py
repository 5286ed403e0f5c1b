"""Operations of the matrix products and convolutions of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def count_flops(step: Callable[[], Any]) -> int:
    """The floating point operations of the products that `step` computes, backward included.

    The fused recurrent and attention kernels have no formula, so they run as their parts. Causal attention counts
    as if nothing were masked.
    """
    formulas = {torch.ops.aten.convolution_backward: convolution_backward_flops}
    with (
        torch.backends.mkldnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=formulas) as counter,
    ):
        step()
    return int(counter.get_total_flops())


def convolution_backward_flops(
    gradient: Sequence[int], _images: Sequence[int], weight: Sequence[int], *others: Any, **_named: Any
) -> int:
    """Twice the forward pass, or once if one gradient is enough. The formula of torch forgets the groups."""
    num_gradients = sum(others[-1][:2])  # the mask for images, weight and bias
    return 2 * math.prod(weight) * gradient[0] * math.prod(gradient[2:]) * int(num_gradients)
