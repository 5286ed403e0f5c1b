"""First optimizer state that was declared without a step: it waits until the step that eager mode makes it in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

import torch
from torch.optim import Optimizer

from monograph.capture.optimizers.tracing import change_state
from monograph.capture.optimizers.trial_steps import first_state
from monograph.compat.distributed.tensors import is_sharded, part_laid_out
from monograph.state.find import RegisteredOptimizer

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Waiting:
    optimizer: Optimizer
    owner: Any
    entries: dict[str, Any]


@dataclass(frozen=True)
class _Declared:
    """Whose state was declared, and its keys."""

    optimizer: ref[Optimizer]
    owner: ref[Any]
    keys: frozenset[str]

    def once_more(self) -> _Waiting | None:
        """First state, if there is none any more."""
        optimizer, owner = self.optimizer(), self.owner()
        if optimizer is None or owner is None or optimizer.state.get(owner):
            return None
        if (group := _group_of(optimizer, owner)) is None:
            return None
        entries = first_state(optimizer, group, owner)
        return _Waiting(optimizer, owner, entries) if entries.keys() == self.keys else None


class FirstState:
    """What a capture declared. Until the first step the optimizers are as the user left them."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.shown: list[_Waiting] = []  # for a step that has not run yet
        self._declared: list[_Declared] = []  # that steps have made

    @contextmanager
    def hidden(self, optimizers: Sequence[RegisteredOptimizer]) -> Iterator[None]:
        """Take out of the optimizers what a capture inside declares."""
        self.show()
        try:
            with self.noted(optimizers):
                yield
        finally:
            self.roll_back()

    @contextmanager
    def noted(self, optimizers: Sequence[RegisteredOptimizer]) -> Iterator[None]:
        """Note what a capture inside declares, to be rolled back if the step fails."""
        own = [(registered.optimizer, set(registered.optimizer.state)) for registered in optimizers]
        try:
            yield
        finally:
            for optimizer, owners in own:
                new = [item for item in optimizer.state.items() if item[0] not in owners]
                self.shown += [_Waiting(optimizer, owner, entries) for owner, entries in new]

    def show(self) -> None:
        """Put it into the optimizers, with the values that the first step would give it now."""
        waiting, self.waiting = self.waiting, []
        # state that is there already is the user's own, from an eager step or a checkpoint
        self.shown = [item for item in waiting if not item.optimizer.state.get(item.owner) and _renew(item)]
        _put(self.shown)

    def owners(self) -> list[Any]:
        """Whose state is shown for a step that has not run yet."""
        return [item.owner for item in self.shown]

    def settle(self) -> None:
        """The step has run: what was shown for it stays."""
        if self.shown:
            whole = (item for item in self.shown if not any(map(is_sharded, item.entries.values())))
            made = [
                _Declared(ref(item.optimizer), ref(item.owner), frozenset(item.entries)) for item in whole
            ]
            new = {id(item.owner()) for item in made}
            self._declared = [item for item in self._declared if id(item.owner()) not in new] + made
            self.shown = []

    def found(self, find: Callable[[], _T | None]) -> _T | None:
        """What is found, perhaps once optimizers that have lost the state which a step had made begin again."""
        if (found := find()) is not None:
            return found
        if not (lost := [item for known in self._declared if (item := known.once_more()) is not None]):
            return None
        _put(lost)
        if (found := find()) is not None:
            self.shown += lost
            return found
        _take_out(lost)
        return None

    def roll_back(self) -> None:
        """The step has failed: what was shown for it waits again."""
        shown, self.shown = self.shown, []
        found = (item for item in shown if item.optimizer.state.get(item.owner) is item.entries)
        there = list({id(item.entries): item for item in found}.values())  # noted twice it waits once
        _take_out(there)
        self.waiting += there

    def of(self, optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
        """What waits for an optimizer, by owner."""
        return {item.owner: item.entries for item in self.waiting if item.optimizer is optimizer}


def _put(items: Sequence[_Waiting]) -> None:
    for optimizer, alike in _by_optimizer(items):
        change_state(optimizer, add={item.owner: item.entries for item in alike})


def _take_out(items: Sequence[_Waiting]) -> None:
    for optimizer, alike in _by_optimizer(items):
        change_state(optimizer, drop=[item.owner for item in alike])


def _by_optimizer(items: Sequence[_Waiting]) -> Iterator[tuple[Optimizer, list[_Waiting]]]:
    for optimizer in {id(item.optimizer): item.optimizer for item in items}.values():
        yield optimizer, [item for item in items if item.optimizer is optimizer]


def _group_of(optimizer: Optimizer, owner: Any) -> dict[str, Any] | None:
    groups = optimizer.param_groups
    return next((group for group in groups if any(item is owner for item in group["params"])), None)


def _renew(item: _Waiting) -> bool:
    """State may start from a hyperparameter, which may have changed since: Rprop's first step size is lr."""
    if (group := _group_of(item.optimizer, item.owner)) is None:
        return False
    fresh = first_state(item.optimizer, group, _updated_part(item))
    if fresh.keys() != item.entries.keys():
        return False
    for key, value in fresh.items():
        item.entries[key] = _renewed(item.entries[key], value)
    return True


def _updated_part(item: _Waiting) -> Any:
    """The parameter, or the part of it that is updated here, if its state is of that alone."""
    like = next((entry for entry in item.entries.values() if is_sharded(entry)), None)
    if like is None or is_sharded(item.owner):
        return item.owner
    return part_laid_out(item.owner.detach(), like.device_mesh, is_split=like.placements[-1].is_shard())


def _renewed(old: Any, new: Any) -> Any:
    """The new value, in the tensors and containers of the old one: a build knows them."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old.copy_(new)
    if type(old) is type(new) is list and len(old) == len(new):
        old[:] = map(_renewed, old, new)
        return old
    if type(old) is type(new) is dict and old.keys() == new.keys():
        old.update({key: _renewed(old[key], value) for key, value in new.items()})
        return old
    return new
