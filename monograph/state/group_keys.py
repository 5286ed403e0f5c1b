"""Keys of param groups that a Graph follows: `clip_grad_max_norm`, `clip_grad_norm_type` and `lr_scale`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from monograph.compat.optimizers import symbolic_limits
from monograph.errors import OptimizerError

CLIP_NORM, CLIP_TYPE, LR_SCALE = "clip_grad_max_norm", "clip_grad_norm_type", "lr_scale"


def has_limits(optimizer: Optimizer) -> bool:
    """True if gradients of some group are to be clipped."""
    return any(group.get(CLIP_NORM) is not None for group in optimizer.param_groups)


def clip(optimizer: Optimizer) -> None:
    """Clip the gradients of each group that has a limit."""
    for group in optimizer.param_groups:
        if (limit := group.get(CLIP_NORM)) is not None:
            if isinstance(limit, torch.Tensor):
                raise OptimizerError(
                    f"{CLIP_NORM} of a param group is a tensor",
                    hint="make it a number: it may move between steps",
                )
            with symbolic_limits():
                torch.nn.utils.clip_grad_norm_(group["params"], limit, norm_type=group.get(CLIP_TYPE, 2.0))


def with_lr_scale(optimizer: Optimizer, run: Callable[[], Any]) -> Any:
    """Step with the learning rates times `lr_scale`; afterwards they are as before."""
    scaled = [(group, group["lr"]) for group in optimizer.param_groups if group.get(LR_SCALE) is not None]
    try:
        for group, rate in scaled:
            group["lr"] = rate * group[LR_SCALE]
        return run()
    finally:
        for group, rate in scaled:
            group["lr"] = rate
