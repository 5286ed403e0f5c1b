"""Optimizers inside a trace: fakes for parameters, symbols for hyperparameters, and declared first state.

torch creates optimizer state lazily, in the first step. A static graph needs it before, so the optimizer's own
`step()` runs on a copy of each parameter, and what it stores first is kept if it does not depend on gradients.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from monograph.capture.guards.optimizers import may_move
from monograph.compat.modes import watching_draws
from monograph.compat.optimizers import without_step_hooks
from monograph.errors import OptimizerError
from monograph.ir.graph_signature import Number
from monograph.state.find import RegisteredOptimizer
from monograph.state.random import cpu_state, set_cpu_state
from monograph.state.threads import alone

REFUSED = {
    "LBFGS": "its step evaluates the closure in a loop whose length depends on data",
    "SparseAdam": "it takes sparse gradients",
}


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse by name optimizers that no static graph can hold."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in REFUSED and kind.__module__.startswith("torch.optim"):
            raise OptimizerError(
                f"{kind.__name__} cannot be captured: {REFUSED[kind.__name__]}",
                hint="use it in eager code, or another optimizer in the graph",
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            "differentiable=True cannot be captured: the update changes parameters in place",
            hint="build the optimizer with differentiable=False",
        )


def hyperparameters(registered: RegisteredOptimizer) -> dict[str, Number]:
    """The numbers in param groups that may move at each step, by path: lr, betas, weight decay …"""
    found: dict[str, Number] = {}
    for index, group in enumerate(registered.optimizer.param_groups):
        for key, value in group.items():
            path = f"{registered.name}/group{index}/{key}"
            if may_move(key, value) or (key == "lr" and type(value) is int):
                found[path] = Number(group, key)
            elif isinstance(value, (tuple, list)) and key != "params":
                for position, item in enumerate(value):
                    if may_move(key, item):
                        found[f"{path}/{position}"] = Number(group, key, position)
    return found


def group_counters(registered: RegisteredOptimizer, moved: Collection[str]) -> dict[str, Number]:
    """The whole numbers in param groups whose paths are in `moved`: an earlier trace saw the step change them."""
    return {
        path: Number(group, key)
        for index, group in enumerate(registered.optimizer.param_groups)
        for key in group
        if (path := f"{registered.name}/group{index}/{key}") in moved
    }


def state_numbers(
    registered: RegisteredOptimizer, state: Mapping[Any, Any], names: Mapping[int, str]
) -> dict[str, Number]:
    """The plain numbers in optimizer state, such as a step counter that is no tensor."""
    found: dict[str, Number] = {}
    for key, entries in state.items():
        owner = names.get(id(key)) if isinstance(key, torch.Tensor) else str(key)
        if owner is not None:
            found.update(_numbers_in(entries, f"{registered.name}/{owner}"))
    return found


def _numbers_in(container: Any, path: str) -> Iterator[tuple[str, Number]]:
    if isinstance(container, (dict, list)):
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if type(value) in (int, float):
                yield f"{path}/{key}", Number(container, key)
            else:
                yield from _numbers_in(value, f"{path}/{key}")


Swap = Callable[[Any], Any]


def groups_with_fakes(
    registered: RegisteredOptimizer, fake: Swap, symbols: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Param groups for a trace: with fakes for tensors and `symbols` for numbers."""
    groups = [dict(group) for group in registered.optimizer.param_groups]
    for index, group in enumerate(groups):
        group["params"] = [fake(parameter) for parameter in group["params"]]
        for key, value in group.items():
            group[key] = _with_symbols(value, f"{registered.name}/group{index}/{key}", symbols, fake)
    return groups


def _with_symbols(value: Any, path: str, symbols: Mapping[str, Any], fake: Swap) -> Any:
    if path in symbols:
        return symbols[path]
    if isinstance(value, torch.Tensor):
        return fake(value)
    if isinstance(value, (tuple, list)) and not path.endswith("/params"):
        items = [symbols.get(f"{path}/{position}", item) for position, item in enumerate(value)]
        return type(value)(items)
    return value


def change_state(
    optimizer: Optimizer, *, add: Mapping[Any, Any] | None = None, drop: Collection[Any] = ()
) -> None:
    """Give an optimizer state of more or fewer owners.

    Where there are other threads, one may be walking through the dict, which must not change its size then: the
    optimizer gets a new one in one go.
    """
    if not add and not drop:
        return
    state = optimizer.state if alone() else copy(optimizer.state)
    state.update(add or {})
    for owner in drop:
        del state[owner]
    if state is not optimizer.state:
        optimizer.state = state


# --- state that does not exist yet ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declared:
    """First optimizer state of one parameter."""

    parameter: torch.Tensor
    entries: dict[str, Any]


def first_state(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that the first step of one parameter would create; empty if its gradient or its place decide on it."""
    if without_step_hooks(type(optimizer).step) is without_step_hooks(SGD.step):
        # the first momentum is the gradient itself, bit for bit: -0.0 * momentum + g == g for every g
        declared = group["momentum"] != 0 and group["dampening"] == 0
        return {"momentum_buffer": torch.full_like(parameter.detach(), -0.0)} if declared else {}
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
    groups = [_group_of(group, parameter, [trained])]
    if among_others:
        there = any(other is group for other in optimizer.param_groups)
        groups = [
            _group_of(other, parameter, [_small(trained), *([trained] if other is group else [])])
            for other in (optimizer.param_groups if there else [group])
        ]
    double = _double(optimizer, state=values, param_groups=groups)
    random = cpu_state()
    drew = False
    watching: AbstractContextManager[list[Any]] = nullcontext([]) if alone() else watching_draws()
    try:
        with torch.no_grad(), watching as draws:
            inspect.unwrap(type(optimizer).step)(double)  # without hooks, which belong to real steps
        last = (dict(values.get(trained, {})), trained.detach())
        drew = bool(draws) or (alone() and not torch.equal(random, cpu_state()))
        return None if drew else _Trial(values.first.get(id(trained), {}), last)
    except Exception:  # the capture of the whole step meets the same problem and reports it with its place
        return None
    finally:
        if (drew or alone()) and not torch.equal(random, cpu_state()):
            set_cpu_state(random)


def _small(trained: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with one element at most in each dimension, and its gradient."""
    made = torch.nn.Parameter(trained.detach()[(slice(1),) * trained.dim()].clone())
    made.grad = torch.ones_like(made.detach())
    return made


def _group_of(group: Mapping[str, Any], parameter: torch.Tensor, params: list[Any]) -> dict[str, Any]:
    """A group like that of a parameter, with others in its place."""
    made = {key: _copied(value) for key, value in group.items() if key != "params"}
    if (names := made.get("param_names")) is not None:
        at = next((at for at, item in enumerate(group["params"]) if item is parameter), 0)
        made["param_names"] = [*names[:1], *names[at : at + 1]][-len(params) :]
    return {**made, "params": params}


def _double(optimizer: Optimizer, **entries: Any) -> Any:
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
