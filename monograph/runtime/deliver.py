"""Outputs of a program on their way out: to the places that the step writes, and to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monograph.compat.autograd import apply_of
from monograph.compat.modes import hidden_from_dispatch_modes
from monograph.errors import GraphBoundaryError
from monograph.ir.graph_signature import (
    Assign,
    Copy,
    CopyToArgument,
    CopyToGradient,
    Gradient,
    Part,
    Recorded,
    Target,
)


def fenced_off(output: torch.Tensor) -> Any:
    """An output that required grad in build(): it still does, and going back from it is an error."""
    with hidden_from_dispatch_modes():
        return _apply_boundary(output, _ANCHOR)


def deliver(target: Target, output: Any, leaves: Sequence[Any]) -> None:
    """Put an output in its place; `leaves` are those of the call's arguments."""
    match target:
        case Copy(tensor):
            tensor.detach().copy_(output)
        case CopyToArgument(index, True) if not leaves[index].requires_grad:
            with torch.enable_grad():
                leaves[index].copy_(fenced_off(output))
        case CopyToArgument(index):
            leaves[index].detach().copy_(output)
        case CopyToGradient(parameter):
            parameter.grad.copy_(output)  # type: ignore[union-attr]
        case Assign(container, key, _, int(index)):
            container[key] = leaves[index]
        case Assign(container, key, True):
            with torch.enable_grad():
                container[key] = fenced_off(output)
        case Assign(container, key):
            container[key] = output
        case Part():
            target.deliver(output)
        case Recorded(log, path):
            log.put(path, output)
        case Gradient(None, index):
            leaves[index].grad = output
        case Gradient(torch.Tensor() as tensor):
            tensor.grad = output


_ANCHOR = torch.zeros((), requires_grad=True)  # lets an output require grad as eager's would; never changed


class _Boundary(torch.autograd.Function):
    """An output that required grad in build(): it still says so, and explains itself if autograd comes back."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return output.data  # no view to autograd: the user may change it in place, as eager's

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GraphBoundaryError(
            "an output of a Graph was used in a backward() outside of it; the graph keeps no autograd history",
            hint="put the loss and its backward() into build(), or detach() the output",
        )


_apply_boundary = apply_of(_Boundary)
