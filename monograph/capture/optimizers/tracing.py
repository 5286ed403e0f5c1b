"""Optimizers inside a trace: fakes for parameters, symbols for hyperparameters, and declared first state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from monograph.capture.guards.optimizers import may_move
from monograph.errors import OptimizerError
from monograph.ir.graph_signature import Number
from monograph.state.find import RegisteredOptimizer
from monograph.state.threads import alone

REFUSED = {  # why, and what to do
    "LBFGS": (
        "its step evaluates the closure in a loop whose length depends on data",
        "use another one, or let a graph with config.keep_gradients() compute loss and gradients, call that in "
        "the closure, and step the optimizer outside (docs/porting.md)",
    ),
    "SparseAdam": (
        "how many rows it updates depends on data",
        "use SGD without momentum or Adagrad for an embedding with sparse=True; or sparse=False and Adam, whose moments "
        "decay in the rows of other batches, too",
    ),
}


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse by name optimizers that no static graph can hold."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in REFUSED and kind.__module__.startswith("torch.optim"):
            why, hint = REFUSED[kind.__name__]
            raise OptimizerError(f"{kind.__name__} cannot be captured: {why}", hint=hint)
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


@dataclass(frozen=True)
class Declared:
    """First optimizer state of one parameter."""

    parameter: torch.Tensor
    entries: dict[str, Any]
