"""What Python moves after a step of an artifact, and the state of one signature."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from monograph.artifact.state.averages import StoredAverage
from monograph.artifact.state.schedules import scheduler_from
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import Json, check, list_of
from monograph.errors import SignatureError
from monograph.ir.call.nested import tensors_in
from monograph.ir.graph_signature import Number

_CONTAINERS = (Mapping, list, tuple, set, frozenset)


class PythonState:
    """What Python moves after a step, and the state of one signature."""

    def __init__(self, state: dict[str, Any], schedulers: Json, averages: Json) -> None:
        self.state = state
        self.averages = {
            path: StoredAverage(decay, state.get(f"ema.{path}")) for path, decay in items_of(averages)
        }
        self.schedulers: dict[str, tuple[str, Any]] = {}
        for name, entry in items_of(schedulers):
            optimizer, kind = list_of(entry, 2)
            groups = entry_of(state, optimizer, "param_groups")
            check(isinstance(groups, list) and all(map(is_dict, groups)), f"{name} has no optimizer")
            self.schedulers[name] = (optimizer, scheduler_from(kind, state.get(name), groups))
        steps = state.get("graph.steps")
        check(type(steps) is int and steps >= 0, "the state has no number of steps")

    def after(self, steps: Mapping[str, int]) -> list[Callable[[], object]]:
        """What comes after a call in which each optimizer steps so often. Each action may be done twice."""
        counted = self.state["graph.steps"] + 1
        actions: list[Callable[[], object]] = [partial(self.state.__setitem__, "graph.steps", counted)]
        for name, (optimizer, scheduler) in self.schedulers.items():
            actions += [partial(_step, name, scheduler)] * steps.get(optimizer, 0)
        if steps:
            actions += [partial(average.finish, average.updates) for average in self.averages.values()]
        return actions

    def state_dict(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The state as `Graph.state_dict()` gives it: its tensors are the live ones."""
        memo = {id(item): item for item in tensors_in(self.state, _CONTAINERS)}
        found: dict[str, Any] = copy.deepcopy(self.state, memo)
        for name, (_, scheduler) in self.schedulers.items():
            found[name] = copy.deepcopy(scheduler.state_dict())
        scaler: Any = found.get("graph.scaler")
        if is_dict(scaler) and "scaler/scale" in tensors:
            scaler["scale"] = float(tensors["scaler/scale"])
            if "_growth_tracker" in scaler and "scaler/growth_tracker" in tensors:
                scaler["_growth_tracker"] = int(tensors["scaler/growth_tracker"])
        if entry_of(found, "graph.rng", "cpu") is not None:
            found["graph.rng"]["cpu"] = torch.get_rng_state()
        return found


def _step(name: str, scheduler: Any) -> None:
    try:
        scheduler.step()
    except Exception as error:  # it computes with what the file says
        raise Damaged(f"{name} cannot step: {error}") from None


class Hyperparameters(MutableMapping[str, float]):
    """The numbers that may be another one at each step, such as `optimizer.0/group0/lr`, by their paths."""

    def __init__(self, numbers: Mapping[str, Number]) -> None:
        self._numbers = dict(numbers)

    def __getitem__(self, path: str) -> float:
        number: float = self._numbers[path].read()
        return number

    def __setitem__(self, path: str, value: float) -> None:
        number = self._numbers[path]
        if type(value) not in (int, float):
            raise SignatureError(f"{path} is a number, not a {type(value).__name__}")
        if number.index is None:
            number.container[number.key] = value
        else:
            items = list(number.container[number.key])
            items[number.index] = value
            number.container[number.key] = tuple(items)

    def __delitem__(self, path: str) -> None:
        raise SignatureError(f"{path} is read by the step and cannot be taken away")

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return repr(dict(self))


def items_of(value: Json) -> list[tuple[str, Json]]:
    check(is_dict(value), "a signature is not described")
    return list(value.items())


def entry_of(state: Mapping[str, Any], part: Json, key: str) -> Any:
    """What a part of the state has under a key; None if there is no such part."""
    found = state.get(part) if type(part) is str else None
    return found.get(key) if isinstance(found, dict) else None


def is_dict(value: object) -> bool:
    return type(value) is dict
