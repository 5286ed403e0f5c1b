"""Outputs of a program on their way to the places that the step writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.compat.distributed.tensors import from_spec, part_of
from monograph.ir.graph_signature import (
    Assign,
    AssignPart,
    Copy,
    CopyToArgument,
    CopyToGradient,
    Gradient,
    Part,
    Recorded,
    Target,
)
from monograph.runtime.live_view import live_view


def deliver(target: Target, output: Any, leaves: Sequence[Any], fence: Callable[[torch.Tensor], Any]) -> None:
    """Put an output in its place; `leaves` are the call's arguments. What required grad in build() goes through `fence`."""
    if isinstance(target, (Assign, Part)) and target.live is not None:
        output = live_view(target.live, leaves)
    match target:
        case Copy(tensor):
            tensor.detach().copy_(output)
        case CopyToArgument(index, True):
            with torch.enable_grad():
                leaves[index].copy_(fence(output))
        case CopyToArgument(index):
            leaves[index].detach().copy_(output)
        case CopyToGradient(parameter):
            held_gradient(parameter).copy_(output)
        case Assign(container, key, _, int(index)):
            container[key] = leaves[index]
        case Assign(container, key, tensor=torch.Tensor() as tensor):
            container[key] = tensor
        case Assign(container, key, True):
            with torch.enable_grad():
                container[key] = fence(output)
        case Assign(container, key):
            container[key] = output
        case AssignPart(container, key, around):
            container[key] = around(output)
        case Part():
            target.deliver(output)
        case Recorded(log, path):
            log.put(path, output)
        case Gradient(None, index):
            leaves[index].grad = output
        case Gradient(torch.Tensor() as tensor):
            tensor.grad = (
                output if output is None or target.layout is None else from_spec(target.layout, output)
            )


def held_gradient(parameter: torch.Tensor) -> Any:
    """The gradient that a parameter has, or what this process has of it."""
    return part_of(parameter.grad)
