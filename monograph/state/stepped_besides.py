"""An optimizer that the user's code steps as well, after a step that has left its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch.optim import Optimizer

from monograph.compat.tensors import version_of
from monograph.state.find import RegisteredOptimizer

_ENOUGH: Final = 2  # elements, since one alone may move anywhere


@dataclass(frozen=True)
class StepLeft:
    """An optimizer as a step of a graph has left it."""

    optimizer: weakref.ref[Optimizer]
    versions: dict[int, int]  # of the tensors of its state, by id
    parameter: torch.Tensor  # the smallest, for optimizers without state
    value: torch.Tensor
    gradient: torch.Tensor

    def is_stepped(self) -> bool:
        """True if its state has been written since, or a parameter has moved along its gradient."""
        optimizer = self.optimizer()
        if optimizer is None:
            return False
        if self.versions:
            found = {id(item): version_of(item) for item in state_tensors(optimizer)}
            return any(found.get(known, before) > before for known, before in self.versions.items())
        return self._is_descent()

    def _is_descent(self) -> bool:
        """True if the smallest parameter has moved along its gradient, by one rate for all elements."""
        gradient = self.gradient.to_dense() if self.gradient.is_sparse else self.gradient
        there = gradient != 0
        rates = (self.parameter.detach() - self.value)[there] / gradient[there]
        if rates.numel() < _ENOUGH or not rates[0]:
            return False
        return bool(((rates - rates[0]).abs() < 0.01 * rates[0].abs()).all())


def step_left(registered: RegisteredOptimizer) -> StepLeft | None:
    """What to look at before the next step; None if the step left no gradients, without which nothing would move."""
    # to compare DTensors would communicate
    with_gradients = [item for item in registered.parameters if type(item.grad) is torch.Tensor]
    if registered.manual or not with_gradients:
        return None
    smallest = min(with_gradients, key=lambda item: (item.numel() < _ENOUGH, item.numel()))
    assert smallest.grad is not None
    return StepLeft(
        weakref.ref(registered.optimizer),
        {id(item): version_of(item) for item in state_tensors(registered.optimizer)},
        smallest,
        smallest.detach().clone(),
        smallest.grad.detach().clone(),
    )


def state_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of the state of an optimizer."""
    for entries in optimizer.state.values():
        values = entries.values() if isinstance(entries, dict) else ()
        yield from (item for item in values if isinstance(item, torch.Tensor))
