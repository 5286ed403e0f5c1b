"""Steps of copies of optimizers, from which is seen what an optimizer does: the state that it begins with, and if it runs on parts.

torch creates optimizer state lazily, in the first step. A static graph needs it before, so the optimizer's own
`step()` runs on a copy of each parameter, and what it stores first is kept if it does not depend on gradients.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, TypeAlias

import torch
from torch.optim import SGD, Optimizer

from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.modes import watching_draws
from monograph.compat.optimizers import without_step_hooks
from monograph.state.random import cpu_state, set_cpu_state
from monograph.state.threads import alone

FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def first_state(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that the first step of one parameter would create; empty if its gradient or its place decide on it.

    That of a DTensor follows from steps on whole parameters with other values: all processes find the same, and none asks another.
    """
    if without_step_hooks(type(optimizer).step) is without_step_hooks(SGD.step):
        # the first momentum is the gradient itself, bit for bit: -0.0 * momentum + g == g for every g
        declared = group["momentum"] != 0 and group["dampening"] == 0
        return {"momentum_buffer": torch.full_like(parameter.detach(), -0.0)} if declared else {}
    if is_sharded(parameter):
        alike = (stand_in(parameter, parameter.shape, values=values) for values in (1, 2))
        rule = rule_shown(optimizer, group, *alike)
        return {} if rule is None else {key: made_for(entry, parameter) for key, entry in rule.items()}
    other = _trial_step(optimizer, group, parameter, float("nan"), among_others=True)
    trial = _trial_step(optimizer, group, parameter, 1.5)
    if other is None or trial is None or not _same(other.first, trial.first):
        return {}
    # a step that only makes its state, and uses it from the next one on, must not find it
    found = _trial_step(optimizer, group, parameter, 1.5, state=_copied(trial.first))
    return trial.first if found is not None and _same(found.last, trial.last) else {}


@dataclass(frozen=True)
class _Trial:
    """What a step of one parameter stored first, and what it left: the state and the parameter."""

    first: dict[str, Any]
    last: tuple[dict[str, Any], torch.Tensor]


def _trial_step(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: float,
    state: dict[str, Any] | None = None,
    among_others: bool = False,
) -> _Trial | None:
    """Step a copy of one parameter with a made-up gradient, without state or from `state`; None if it fails.

    With `among_others` it comes after another one, in its group among the others: first state may be made from a place.
    """
    trained = torch.nn.Parameter(parameter.detach().clone())
    trained.grad = torch.full_like(trained.detach(), gradient)
    values = _FirstValues()
    if state is not None:
        values[trained] = state
    groups = [group_of(group, parameter, [trained])]
    if among_others:
        there = any(other is group for other in optimizer.param_groups)
        groups = [
            group_of(other, parameter, [_small(trained), *([trained] if other is group else [])])
            for other in (optimizer.param_groups if there else [group])
        ]
    double = double_of(optimizer, state=values, param_groups=groups)
    random = cpu_state()
    drew = False
    watching: AbstractContextManager[list[Any]] = nullcontext([]) if alone() else watching_draws()
    try:
        with torch.no_grad(), watching as draws:
            step_without_hooks(double)
        last = (dict(values.get(trained, {})), trained.detach())
        drew = bool(draws) or (alone() and not torch.equal(random, cpu_state()))
        return None if drew else _Trial(values.first.get(id(trained), {}), last)
    except Exception:  # the capture of the whole step meets the same problem and reports it with its place
        return None
    finally:
        if (drew or alone()) and not torch.equal(random, cpu_state()):
            set_cpu_state(random)


def step_without_hooks(double: Any) -> None:
    """A step of a copy: hooks belong to real steps."""
    inspect.unwrap(type(double).step)(double)


def _small(trained: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with one element at most in each dimension, and its gradient."""
    made = torch.nn.Parameter(trained.detach()[(slice(1),) * trained.dim()].clone())
    made.grad = torch.ones_like(made.detach())
    return made


def group_of(group: Mapping[str, Any], parameter: torch.Tensor, params: list[Any]) -> dict[str, Any]:
    """A group like that of a parameter, with others in its place."""
    made = {key: _copied(value) for key, value in group.items() if key != "params"}
    if (names := made.get("param_names")) is not None:
        at = next((at for at, item in enumerate(group["params"]) if item is parameter), 0)
        made["param_names"] = [*names[:1], *names[at : at + 1]][-len(params) :]
    return {**made, "params": params}


def double_of(optimizer: Optimizer, **entries: Any) -> Any:
    """An optimizer with copies of what another one holds, and with `entries`: other threads may be using that one."""
    double = object.__new__(type(optimizer))
    for name, value in dict(vars(optimizer)).items():
        if name not in entries:
            of_it = isinstance(value, MethodType) and value.__self__ is optimizer
            vars(double)[name] = MethodType(value.__func__, double) if of_it else _copied(value)
    vars(double).update(entries)
    return double


def _copied(value: Any) -> Any:
    """A value with copies of the tensors, lists, dicts and sets in it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copied(item) for item in value)
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        return alike and (a.is_meta or bool(torch.equal(a, b)))  # without data there is no more to compare
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


class _FirstEntries(dict[str, Any]):
    """Optimizer state of one parameter that keeps a copy of the first value of each key."""

    def __init__(self, first: dict[str, Any]) -> None:
        super().__init__()
        self._first = first

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._first:
            self._first[key] = _copied(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        for key, value in dict(*others, **entries).items():
            self[key] = value


class _FirstValues(defaultdict[Any, Any]):
    """Optimizer state whose entries, by id of their parameter, keep their first values."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, dict[str, Any]] = {}

    def __missing__(self, owner: Any) -> _FirstEntries:
        entries = _FirstEntries(self.first.setdefault(id(owner), {}))
        super().__setitem__(owner, entries)
        return entries

    def __setitem__(self, owner: Any, entries: Any) -> None:
        self.__missing__(owner).update(entries)


# --- how first state follows from a parameter ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """A number, or a tensor: of one number all over, without dimensions or with the form of its parameter, or a copy of that."""

    kind: type
    number: Any = 0.0
    sign: float = 0.0
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    like_parameter: bool = False
    copies: bool = False

    def made_for(self, parameter: torch.Tensor) -> Any:
        """The entry of another parameter."""
        if self.copies:
            return parameter.detach().clone()
        if self.dtype is None:
            return self.number
        if self.like_parameter:
            return torch.full_like(parameter.detach(), self.number, dtype=self.dtype, device=self.device)
        return torch.full((), self.number, dtype=self.dtype, device=self.device)


Rule: TypeAlias = Mapping[str, Any]  # of entries, or lists and dicts of them


def rule_shown(
    optimizer: Optimizer, group: dict[str, Any], first: torch.Tensor, second: torch.Tensor
) -> Rule | None:
    """How first state follows from a parameter, if it does for both of two in the same way."""
    rules = [
        {key: _entry_of(value, item) for key, value in first_state(optimizer, group, item).items()}
        for item in (first, second)
    ]
    return rules[0] if rules[0] and rules[0] == rules[1] and _is_known(rules[0]) else None


def made_for(entry: Any, parameter: torch.Tensor) -> Any:
    """An entry, or a list or dict of entries, of another parameter."""
    if isinstance(entry, dict):
        return {key: made_for(item, parameter) for key, item in entry.items()}
    if isinstance(entry, list):
        return [made_for(item, parameter) for item in entry]
    return entry.made_for(parameter)


def stand_in(parameter: torch.Tensor, shape: Sequence[int], *, values: int = 1) -> torch.Tensor:
    """A whole parameter of the dtype and device of another one, with a shape and with values of its own."""
    made = torch.empty([*shape], dtype=parameter.dtype, device=parameter.device)
    numbers = torch.arange(made.numel(), dtype=torch.float64, device=parameter.device)
    return torch.nn.Parameter(made.copy_((numbers % 97 + values).reshape(made.shape) / 8))


def _is_known(entry: Any) -> bool:
    if isinstance(entry, (dict, list)):
        return all(map(_is_known, entry.values() if isinstance(entry, dict) else entry))
    return entry is not None


def _entry_of(value: Any, parameter: torch.Tensor) -> Any:
    """How a value follows from its parameter, None if it does not; of a list or dict one of each item."""
    if type(value) is dict:
        return {key: _entry_of(item, parameter) for key, item in value.items()}
    if type(value) is list:
        return [_entry_of(item, parameter) for item in value]
    if type(value) in (int, float, bool):
        return _entry_with(value, type(value))
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
        return None
    if not value.numel() or value.dtype not in FLOATS:
        return None
    like_parameter = bool(value.dim()) and value.shape == parameter.shape
    if not (like_parameter and value.stride() == parameter.stride()) and value.dim():
        return None
    number = 0.0 if value.is_meta else value.flatten()[0].item()  # without data any will do
    found = _entry_with(
        number, torch.Tensor, dtype=value.dtype, device=value.device, like_parameter=like_parameter
    )
    like = torch.full_like(value, number)
    if value.is_meta or (torch.equal(value, like) and torch.equal(value.signbit(), like.signbit())):
        return found
    copies = like_parameter and value.dtype == parameter.dtype and torch.equal(value, parameter.detach())
    return _Entry(torch.Tensor, copies=True) if copies else None


def _entry_with(number: Any, kind: type, **form: Any) -> _Entry | None:
    """Zeros have signs, and a NaN is equal to none."""
    if number != number:
        return None
    return _Entry(kind, number, torch.tensor(float(number), dtype=torch.float64).signbit().item(), **form)
