"""First optimizer state of all parameters, found before the first step.

Torch's own optimizers begin alike for all parameters of a kind: a step on a copy of one shows what each gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from monograph.capture.optimizers.tracing import Declared, first_state
from monograph.compat.optimizers import is_torchs_own
from monograph.state.find import RegisteredOptimizer

_CORNER: Final = 8  # elements in each dimension
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


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
        self._rules: dict[tuple[Any, ...], Mapping[str, _Entry] | None] = {}

    def first_state(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """What the first step would give a parameter."""
        kind = _kind_of(group, parameter) if self._has_rules else None
        if kind is None:
            return first_state(self._optimizer, group, parameter)
        if kind not in self._rules:
            self._rules[kind] = self._rule(group, _corner_of(parameter))
        rule = self._rules[kind]
        if rule is None:
            return first_state(self._optimizer, group, parameter)
        return {key: entry.made_for(parameter) for key, entry in rule.items()}

    def _rule(self, group: dict[str, Any], parameter: torch.Tensor) -> Mapping[str, _Entry] | None:
        """How the entries follow from the form of a parameter; None if they do not for one of other sizes and values."""
        rule = self._shown(group, parameter)
        known = {key: entry for key, entry in rule.items() if entry is not None}
        if not known or len(known) < len(rule):
            return None
        return known if self._shown(group, _other_like(parameter)) == known else None

    def _shown(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, _Entry | None]:
        entries = first_state(self._optimizer, group, parameter)
        return {key: _entry_of(value, parameter) for key, value in entries.items()}


@dataclass(frozen=True)
class _Entry:
    """A number, or a tensor that holds one number all over: of no dimension, or with the form of its parameter."""

    kind: type
    number: Any
    sign: float
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    like_parameter: bool = False

    def made_for(self, parameter: torch.Tensor) -> Any:
        """The entry of another parameter."""
        if self.dtype is None:
            return self.number
        if self.like_parameter:
            return torch.full_like(parameter.detach(), self.number, dtype=self.dtype, device=self.device)
        return torch.full((), self.number, dtype=self.dtype, device=self.device)


def _entry_of(value: Any, parameter: torch.Tensor) -> _Entry | None:
    """How a value follows from the form of its parameter; None if it does not so."""
    if type(value) in (int, float, bool):
        return _entry_with(value, type(value))
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
        return None
    if not value.numel() or value.dtype not in _FLOATS:
        return None
    like_parameter = bool(value.dim()) and value.shape == parameter.shape
    if not (like_parameter and value.stride() == parameter.stride()) and value.dim():
        return None
    number = 0.0 if value.is_meta else value.flatten()[0].item()  # without data any will do
    like = torch.full_like(value, number)
    if not value.is_meta and not (torch.equal(value, like) and torch.equal(value.signbit(), like.signbit())):
        return None
    return _entry_with(
        number, torch.Tensor, dtype=value.dtype, device=value.device, like_parameter=like_parameter
    )


def _entry_with(number: Any, kind: type, **form: Any) -> _Entry | None:
    """Zeros have signs, and a NaN is equal to none."""
    if number != number:
        return None
    return _Entry(kind, number, torch.tensor(float(number), dtype=torch.float64).signbit().item(), **form)


def _kind_of(group: dict[str, Any], parameter: torch.Tensor) -> tuple[Any, ...] | None:
    """What decides on the form of first state; None for a parameter that is like no other."""
    if type(parameter) not in (nn.Parameter, torch.Tensor) or parameter.layout is not torch.strided:
        return None
    if not parameter.numel() or not parameter.is_contiguous() or parameter.dtype not in _FLOATS:
        return None
    return id(group), parameter.dtype, parameter.device, parameter.dim()


def _corner_of(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter with the first values of another one in each dimension: steps of it cost little."""
    return nn.Parameter(
        parameter.detach()[(slice(_CORNER),) * parameter.dim()].clone(memory_format=torch.contiguous_format)
    )


def _other_like(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter of the same kind with other sizes and values."""
    dim, known = parameter.dim(), {*parameter.shape, parameter.numel()}
    size = next(size for size in range(2, 32) if not {size, size**dim} & known or not dim)
    sizes = [size] * dim
    made = torch.empty(sizes, dtype=parameter.dtype, device=parameter.device)
    values = torch.arange(1, made.numel() + 1, dtype=torch.float64, device=parameter.device).reshape(sizes)
    return nn.Parameter(made.copy_(values / 8))
