"""Mixed precision with OneFlow's arguments: scalers for `graph.set_grad_scaler()`, and PyTorch's autocast."""

from __future__ import annotations

from typing import Any

import torch

import monograph as mg
from monograph.flow.names import forwarding

__getattr__ = forwarding("amp", torch.amp)


class GradScaler(torch.amp.GradScaler):
    """A scale that grows, and shrinks when gradients are infinite; for the GPU if there is one, else for the CPU."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


class StaticGradScaler(mg.amp.StaticGradScaler):
    """A scale that stays."""

    def __init__(self, scale_factor: float) -> None:
        super().__init__(scale_factor)


def autocast_decorator(autocast_instance: Any, func: Any) -> Any:
    """The function under autocast."""
    return autocast_instance(func)
