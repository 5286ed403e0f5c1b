"""What OneFlow's optimizers have in common: gradients that become zeros, clipping by group, checks of options."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import optim

from monograph import OptimizerError


class OneFlowOptimizer(optim.Optimizer):
    """What OneFlow's optimizers do besides PyTorch's methods, or otherwise."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill the gradients with zeros; with `set_to_none`, which is PyTorch's default, let go of them."""
        super().zero_grad(set_to_none)

    def clip_grad(self, error_if_nonfinite: bool = False) -> None:
        """Clip the gradients of each param group to its `clip_grad_max_norm`, in eager mode.

        The norm is that of all gradients of a group together, of the order `clip_grad_norm_type`. A Graph clips by
        itself.
        """
        for index, group in enumerate(self.param_groups):
            if group.get("clip_grad_max_norm") is None:
                warnings.warn(
                    f"param group {index} has no clip_grad_max_norm, so nothing is clipped", stacklevel=2
                )
                continue
            torch.nn.utils.clip_grad_norm_(
                group["params"],
                group["clip_grad_max_norm"],
                group.get("clip_grad_norm_type", 2.0),
                error_if_nonfinite=error_if_nonfinite,
            )


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step gives; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(group: dict[str, Any]) -> list[Any]:
    """The parameters of a group that have gradients."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def state_like(state: dict[str, Any], name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor of a parameter, which begins with zeros."""
    if name not in state:
        state[name] = torch.zeros_like(parameter)
    return cast(torch.Tensor, state[name])


def check_no_maximize(kind: str, maximize: bool) -> None:
    """Raise OptimizerError for an option whose formula OneFlow has wrongly."""
    if maximize:
        raise OptimizerError(
            f"{kind}(maximize=True): OneFlow's formula adds the weight decay with the wrong sign",
            hint=f"negate the loss, or use torch.optim.{kind}(maximize=True)",
        )


def check_not_negative(kind: str, **values: float) -> None:
    """Raise OptimizerError for options below zero."""
    for name, value in values.items():
        if value < 0:
            raise OptimizerError(
                f"{kind}({name}={value}): it must not be negative", hint=f"give another {name}"
            )
