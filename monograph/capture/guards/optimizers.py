"""Guards on optimizers: param groups and the objects in their state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from monograph.capture.guards.sources.values import ABSENT
from monograph.state.find import RegisteredOptimizer
from monograph.state.group_keys import CLIP_TYPE

# what schedulers keep in param groups for themselves
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"})
Counters = frozenset[tuple[int, str]]  # numbers that the step itself moves: id of their container, and key


def may_move(key: str, value: object) -> bool:
    """True for entries of param groups that are inputs of a program. Infinity is none, nor the kind of a norm."""
    return type(value) is float and math.isfinite(value) and key != CLIP_TYPE


def group_items(group: Mapping[str, Any], counters: Counters) -> Iterator[tuple[str, Any]]:
    """The guarded values of a param group: values as they are, and of numbers that may move only that they are numbers."""
    for key, value in group.items():
        kind = type(value)
        if key == "params" or key in OF_SCHEDULERS:
            continue
        if may_move(key, value) or (kind is int and (key == "lr" or (id(group), key) in counters)):
            yield key, float
        elif kind is tuple or kind is list:
            for position, item in enumerate(value):
                yield f"{key}/{position}", float if may_move(key, item) else item
        else:
            yield key, value


def guarded_values(registered: RegisteredOptimizer, counters: Counters) -> list[Any]:
    """The param groups of an optimizer, their parameters, and every entry that is no moving number."""
    values: list[Any] = []
    for group in registered.optimizer.param_groups:
        values.append(group)
        values.extend(group["params"])
        values.extend([value for _, value in group_items(group, counters)])
    return values


def only_tensors(entries: Any) -> bool:
    """True if the state of one parameter is a flat dict of tensors, which can be gathered at C speed."""
    return isinstance(entries, dict) and all(type(entry) is torch.Tensor for entry in entries.values())


def state_entries(entries: Any) -> Iterable[Any]:
    """The objects in the state of one parameter; of numbers only their kind, since they move."""
    for entry in entries.values() if isinstance(entries, dict) else entries:
        kind = type(entry)
        if kind is torch.Tensor:
            yield entry
        elif kind is dict or kind is list:
            yield from state_entries(entry)
        elif kind is int or kind is float:
            yield kind
        else:
            yield entry


def labelled_group_values(registered: RegisteredOptimizer, counters: Counters) -> Iterator[tuple[str, Any]]:
    """The guarded values of param groups with labels, for messages."""
    for index, group in enumerate(registered.optimizer.param_groups):
        yield f"{registered.name}/group{index}", group
        for position, parameter in enumerate(group["params"]):
            yield f"{registered.name}/group{index}/params/{position}", parameter
        for key, value in group_items(group, counters):
            yield f"{registered.name}/group{index}/{key}", value


def labelled_state_values(path: str, entries: Any) -> Iterator[tuple[str, Any]]:
    """The guarded values in the state of one owner with labels, for messages."""
    for key, entry in entries.items() if isinstance(entries, dict) else enumerate(entries):
        kind = type(entry)
        if kind is dict or kind is list:
            yield from labelled_state_values(f"{path}/{key}", entry)
        elif entry is not ABSENT:
            yield f"{path}/{key}", kind if kind is int or kind is float else entry


def owner_name(owner: Any, names: Mapping[int, str]) -> str:
    """What to call the owner of state; `names` has those of parameters by id."""
    return names.get(id(owner), "a parameter") if isinstance(owner, torch.Tensor) else str(owner)
