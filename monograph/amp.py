"""Mixed precision: the scaler whose scale never moves. The moving one is `torch.amp.GradScaler`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from monograph.errors import DefinitionError


class StaticGradScaler:
    """Scales the loss by a constant and divides the gradients by it again; it looks for no infinities.

    The methods are those of `torch.amp.GradScaler`, so that eager code can use it too.

    >>> scaler = StaticGradScaler(8.0)
    >>> scaler.scale(torch.tensor(2.0))
    tensor(16.)
    """

    def __init__(self, scale: float) -> None:
        if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
            raise DefinitionError(
                f"StaticGradScaler({scale!r}): the scale must be a positive number",
                hint="a power of two loses no bits: StaticGradScaler(2.0**12)",
            )
        self._scale = float(scale)
        self._unscaled: tuple[Optimizer, ...] = ()  # since the last update()

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return outputs * self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, once in each step."""
        if any(item is optimizer for item in self._unscaled):
            return
        self._unscaled = (*self._unscaled, optimizer)
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if gradients:
            with torch.no_grad():
                torch._foreach_mul_(gradients, 1.0 / self._scale)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that is not done yet, and step."""
        self.unscale_(optimizer)
        return optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """End the step. The scale stays."""
        self._unscaled = ()

    def get_scale(self) -> float:
        """The scale."""
        return self._scale

    def is_enabled(self) -> bool:
        """Always true."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """The scale."""
        return {"scale": self._scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scale of a state dict."""
        self._scale = StaticGradScaler(state_dict["scale"]).get_scale()
