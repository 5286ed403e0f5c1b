"""The two sides of a comparison: eager mode, and the Graph as a mode runs it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from monograph.testing.alignment.arguments import Arguments
from monograph.testing.alignment.calls import Call
from monograph.testing.alignment.case import Case
from monograph.testing.alignment.copies import copied_target
from monograph.testing.alignment.record import Record, State, record, state_of
from monograph.testing.alignment.refusals import check_made, check_optimizer
from monograph.testing.alignment.step import (
    AlignedStep,
    Backward,
    Returned,
    Target,
    module_of,
    move_state,
    run_step,
    seed_all,
)
from monograph.testing.modes import Mode


class _Side:
    """A copy of the target with an optimizer for it, looked at before and after each call."""

    def __init__(self, case: Case, target: Target, backward: Backward | None, *, exact: bool = False) -> None:
        self._target = copied_target(target)
        self._module = module_of(self._target)
        if exact and self._module is not None:
            self._module.double()
        self._backward = backward
        self._optimizer = _optimizer(case, self._module, backward)

    def _ready(self, call: Call) -> State:
        """Set random numbers and gradients; gives the state before the call."""
        if self._module is not None:
            self._module.zero_grad()
        if call.moved:
            move_state(self._module, self._optimizer)
        seed_all(call.seed)
        return state_of(self._module)

    def _record(self, returned: Returned, arguments: Arguments, before: State) -> Record:
        whole = self._backward is not None
        return record(returned, arguments, self._module, self._optimizer, before, whole=whole)


class Reference(_Side):
    """The step in eager mode, on a copy of the reference; no Graph takes part."""

    def __init__(self, case: Case, backward: Backward | None, *, exact: bool = False) -> None:
        super().__init__(case, case.reference, backward, exact=exact)
        self._exact = exact

    def run(self, call: Call) -> Record:
        """One step, and what it has made and changed."""
        arguments, given = call.copied(), list(call.given)
        if self._exact:
            arguments, given = in_float64(arguments, call.wanted), [_wide(gradient) for gradient in given]
        before = self._ready(call)
        returned = run_step(self._target, arguments, self._backward, given)
        if self._optimizer is not None:
            self._optimizer.step()
        return self._record(returned, arguments, before)


class Candidate(_Side):
    """The step as a Graph, on a copy of the target, called as a mode says."""

    def __init__(self, case: Case, backward: Backward | None, mode: Mode) -> None:
        super().__init__(case, case.target, backward)
        self.graph = AlignedStep(self._target, backward, self._optimizer)
        self._call = check_made(mode.make(self.graph), mode)

    def run(self, call: Call) -> Record:
        """One step, and what it has made and changed."""
        arguments = call.copied()
        before = self._ready(call)
        returned = self._call(arguments.args, arguments.kwargs, list(call.given))
        return self._record(returned, arguments, before)


def in_float64(arguments: Arguments, wanted: tuple[bool, ...]) -> Arguments:
    """The arguments with twice the digits."""

    wide = arguments.mapped(lambda leaf: _wide(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf)
    for tensor, narrow in zip(wide.requiring(wanted).tensors(), arguments.tensors(), strict=True):
        if narrow.is_leaf and narrow.grad is not None:
            tensor.grad = _wide(narrow.grad.clone())
    return wide


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _optimizer(case: Case, module: nn.Module | None, backward: Backward | None) -> Optimizer | None:
    parameters = [p for p in module.parameters() if p.requires_grad] if module is not None else []
    if backward is None or not parameters:
        return None
    if case.optimizer is None:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return check_optimizer(case.optimizer(parameters))
