"""First optimizer state of all parameters, found before the first step.

Torch's own optimizers begin alike for all parameters of a kind: a step on a copy of one shows what each gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from monograph.capture.optimizers.tracing import Declared
from monograph.capture.optimizers.trial_steps import (
    FLOATS,
    Rule,
    first_state,
    made_for,
    rule_shown,
    stand_in,
)
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.optimizers import is_torchs_own
from monograph.state.find import RegisteredOptimizer

_CORNER: Final = 8  # elements in each dimension


def declare_state(
    registered: RegisteredOptimizer, parts: Mapping[int, Any] = MappingProxyType({})
) -> list[Declared]:
    """The state that the first step would create, found without a step; nothing is changed.

    `parts` has by id of a parameter the part of it that is updated.

    Entries that depend on gradients are left out: the first step then gets a build of its own.
    """
    found = []
    kinds = _Kinds(registered.optimizer)
    for group in registered.optimizer.param_groups:
        new = [
            item
            for item in group["params"]
            if item.requires_grad and not registered.optimizer.state.get(item)
        ]
        entries = ((item, kinds.first_state(group, parts.get(id(item), item))) for item in new)
        found += [Declared(item, first) for item, first in entries if first]
    return found


class _Kinds:
    """The first state of parameters of each kind of one optimizer, by a rule where there is one.

    A rule is what steps on two small parameters show, one with values of a real one: they differ in sizes and values.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._has_rules = is_torchs_own(optimizer)
        self._rules: dict[tuple[Any, ...], Rule | None] = {}

    def first_state(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """What the first step would give a parameter."""
        kind = _kind_of(group, parameter) if self._has_rules else None
        if kind is None:
            return first_state(self._optimizer, group, parameter)
        if kind not in self._rules:
            alike = _corner_of(parameter), stand_in(parameter, _other_shape(parameter))
            self._rules[kind] = rule_shown(self._optimizer, group, *alike)
        rule = self._rules[kind]
        if rule is None:
            return first_state(self._optimizer, group, parameter)
        return {key: made_for(entry, parameter) for key, entry in rule.items()}


def _kind_of(group: dict[str, Any], parameter: torch.Tensor) -> tuple[Any, ...] | None:
    """What decides on the form of first state; None for a parameter that is like no other."""
    in_parts = is_sharded(parameter)
    is_plain = in_parts or type(parameter) in (nn.Parameter, torch.Tensor)
    if not is_plain or parameter.layout is not torch.strided or parameter.dtype not in FLOATS:
        return None
    if not parameter.numel() or not parameter.is_contiguous():
        return None
    return id(group), parameter.dtype, parameter.device, parameter.dim(), in_parts


def _corner_of(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with the first values of another one in each dimension, or made-up ones of a DTensor: steps of it cost little."""
    if is_sharded(parameter):
        return stand_in(parameter, [min(size, _CORNER) for size in parameter.shape], values=2)
    return nn.Parameter(
        parameter.detach()[(slice(_CORNER),) * parameter.dim()].clone(memory_format=torch.contiguous_format)
    )


def _other_shape(parameter: torch.Tensor) -> list[int]:
    """The shape of a parameter of the same kind with other sizes."""
    dim, known = parameter.dim(), {*parameter.shape, parameter.numel()}
    return [next(size for size in range(2, 32) if not {size, size**dim} & known or not dim)] * dim
