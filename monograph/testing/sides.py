"""The two sides of a comparison: eager mode, and the Graph as a mode runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from monograph.testing.arguments import Arguments
from monograph.testing.calls import Call, copied_target
from monograph.testing.case import Case
from monograph.testing.modes import Mode
from monograph.testing.record import Record, record
from monograph.testing.step import AlignedStep, Backward, Target, run_step


class Reference:
    """The step in eager mode, on a copy of the reference; no Graph takes part."""

    def __init__(self, case: Case, backward: Backward | None, *, exact: bool = False) -> None:
        self._target = copied_target(case.reference)
        self._exact = exact
        if exact and isinstance(self._target, nn.Module):
            self._target.double()
        self._backward = backward
        self._optimizer = _optimizer(case, self._target, backward)

    def run(self, call: Call) -> Record:
        """One step, and what it left behind."""
        arguments, given = call.copied(), list(call.given)
        if self._exact:
            arguments, given = in_float64(arguments, call.wanted), [gradient.double() for gradient in given]
        _without_gradients(self._target)
        torch.manual_seed(call.seed)
        returned = run_step(self._target, arguments, self._backward, given)
        if self._optimizer is not None:
            self._optimizer.step()
        return record(returned, arguments, self._target, self._optimizer, whole=self._backward is not None)


class Candidate:
    """The step as a Graph, on a copy of the target, called as a mode says."""

    def __init__(self, case: Case, backward: Backward | None, mode: Mode) -> None:
        self._target = copied_target(case.target)
        self._backward = backward
        self._optimizer = _optimizer(case, self._target, backward)
        self.graph = AlignedStep(self._target, backward, self._optimizer)
        self._call = mode.make(self.graph)

    def run(self, call: Call) -> Record:
        """One step, and what it left behind."""
        arguments = call.copied()
        _without_gradients(self._target)
        torch.manual_seed(call.seed)
        returned = self._call(arguments.args, arguments.kwargs, list(call.given))
        return record(returned, arguments, self._target, self._optimizer, whole=self._backward is not None)


def in_float64(arguments: Arguments, wanted: tuple[bool, ...]) -> Arguments:
    """The arguments with twice the digits."""

    def widened(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wide = torch.complex128 if leaf.is_complex() else torch.float64
        return leaf.detach().to(wide) if leaf.is_complex() or leaf.is_floating_point() else leaf

    return arguments.mapped(widened).requiring(wanted)


def _optimizer(case: Case, target: Target, backward: Backward | None) -> Optimizer | None:
    parameters = [p for p in target.parameters() if p.requires_grad] if isinstance(target, nn.Module) else []
    if backward is None or not parameters:
        return None
    if case.optimizer is None:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return case.optimizer(parameters)


def _without_gradients(target: Target) -> None:
    if isinstance(target, nn.Module):
        target.zero_grad()
