"""The step of a case: the callable, its backward with given output gradients, the update. Plain PyTorch, run twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from monograph import Graph
from monograph.ir.call.tree import flatten
from monograph.testing.alignment.arguments import Arguments

Target = Callable[..., Any]  # a function, or a module
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def module_of(target: Target) -> nn.Module | None:
    """The module that a target is, or is a method of."""
    held = target.__self__ if isinstance(target, MethodType) else target
    return held if isinstance(held, nn.Module) else None


def seed_all(seed: int) -> None:
    """One beginning for all random numbers; autocast forgets the weights of earlier steps."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.clear_autocast_cache()


def move_state(module: nn.Module | None, optimizer: Optimizer | None) -> None:
    """Halve weights, buffers and learning rates, as a user may change them: a graph must not keep the old ones."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()) if module is not None else ():
            written_once = tensor.layout is not torch.strided or 0 not in tensor.stride()
            if (tensor.is_floating_point() or tensor.is_complex()) and written_once:
                tensor.mul_(0.5)
        for group in optimizer.param_groups if optimizer is not None else ():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5


@dataclass(frozen=True)
class Backward:
    """What backward starts from, as found in eager mode."""

    wanted: tuple[bool, ...]  # which tensors among the arguments take gradients
    starts: tuple[int, ...]  # which leaves of the results, and of clones of the arguments, have a gradient
    through_clones: bool  # the callable changes an argument that takes a gradient: it gets clones


@dataclass(frozen=True)
class Returned:
    """What a step gives back."""

    result: Any
    clones: list[torch.Tensor]  # arguments that the callable was given as clones, as it left them
    parameter_gradients: dict[str, torch.Tensor]


def forward(target: Target, arguments: Arguments, *, through_clones: bool) -> tuple[Any, list[torch.Tensor]]:
    """Call the target, if need be on clones of arguments that take gradients."""
    clones: dict[int, torch.Tensor] = {}

    def cloned(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
            return leaf
        if id(leaf) not in clones:
            clones[id(leaf)] = leaf.clone()
        return clones[id(leaf)]

    args, kwargs = arguments.mapped(cloned) if through_clones else arguments
    return target(*args, **kwargs), list(clones.values())


def starts_of(result: Any, clones: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors at which backward could start, in the order of `Backward.starts`."""
    leaves: list[Any] = []
    flatten([result, clones], leaves)
    return leaves


def run_step(
    target: Target, arguments: Arguments, backward: Backward | None, given: Sequence[torch.Tensor]
) -> Returned:
    """Forward, and backward from the gradients `given` for its starts."""
    result, clones = forward(
        target, arguments, through_clones=backward is not None and backward.through_clones
    )
    if backward is None:
        return Returned(result, clones, {})
    leaves = starts_of(result, clones)
    torch.autograd.backward([leaves[index] for index in backward.starts], list(given))
    module = module_of(target)
    parameters = module.named_parameters() if module is not None else ()
    gradients = {name: p.grad.detach().clone() for name, p in parameters if p.grad is not None}
    return Returned(result, clones, gradients)


class AlignedStep(Graph):
    """The step of a case as a Graph."""

    def __init__(self, target: Target, backward: Backward | None, optimizer: Optimizer | None) -> None:
        super().__init__()
        self.target = target
        self.module = module_of(target)  # a Graph holds modules by their attributes
        self.backward = backward
        if optimizer is not None:
            self.add_optimizer(optimizer)

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]) -> Returned:
        """The arguments of the callable, and the gradients of its results."""
        return run_step(self.target, Arguments(args, kwargs), self.backward, given)
