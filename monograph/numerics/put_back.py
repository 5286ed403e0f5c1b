"""All that a step can change, kept with its values, to be made as it was: object by object and bit by bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from monograph.capture.effects.python_objects.growth import Growth
from monograph.capture.guards.sources.hidden import Probe
from monograph.capture.guards.sources.places import Closure, Content, Entries, Slots, Source
from monograph.capture.guards.sources.values import ABSENT, same
from monograph.capture.optimizers.first_state import FirstState
from monograph.capture.step.generators import KnownGenerators
from monograph.capture.step.request import Request
from monograph.compat.distributed.tensors import part_of
from monograph.compiler import Build
from monograph.ir.call.nested import tensors_in
from monograph.numerics.judge import same_bits
from monograph.state.snapshot import Snapshot, take_snapshot
from monograph.state.state_store import StateStore

_DEPTH = 6  # of nesting


class Kept:
    """What a Graph holds and was called with, at this moment.

    It is a Snapshot, and the bits that only a step that has run can change: a trace works on fakes and changes none.
    """

    def __init__(
        self, request: Request, store: StateStore, first: FirstState, builds: Iterable[Build]
    ) -> None:
        owned = request.owned
        modules = owned.named_modules()
        self._generators = KnownGenerators(request, modules)
        self._snapshot = take_snapshot(owned, modules)
        self._snapshot.random.touched = True
        for registered in owned.optimizers:
            _keep_scheduler(self._snapshot, registered.scheduler)
        for average in owned.averages:
            self._snapshot.add_object(average.path, average)
        self._store, self._first = store, first
        self._counts = store.steps, store.torn, list(first.waiting)
        found: dict[int, torch.Tensor] = {}
        for table, _ in self._snapshot.tables:
            found |= {id(tensor): tensor for tensor in _tensors(table)}
        found |= {id(tensor): tensor for tensor in _tensors(request.call.leaves)}
        found |= {id(tensor): tensor for build in builds for tensor in build.executor.bound.held_tensors}
        self._tensors = [(tensor, _Value(tensor)) for tensor in found.values()]
        self._objects = [
            _Object(source)
            for build in builds
            for source in build.captured.guards.sources
            if source.followed and isinstance(source, (Entries, Slots, Closure, Content, Probe))
        ]
        grown = [growth for build in builds for growth in build.captured.grown if isinstance(growth, Growth)]
        self._lists = [(growth.content, list(growth.content)) for growth in grown]

    def restore(self) -> None:
        """Make it all as it was. May be called again."""
        self._snapshot.restore()
        self._generators.restore()
        for item in self._objects:
            item.put_back()
        for content, items in self._lists:
            if len(content) != len(items):
                content[:] = items
        for tensor, value in self._tensors:
            value.put_back(tensor)
        self._store.steps, self._store.torn, waiting = self._counts
        self._first.waiting = list(waiting)


class _Object:
    """What a step could read of an object of Python that the graph does not hold, or change in it."""

    def __init__(self, source: Source) -> None:
        self._source, self._before = source, _seen(source)

    def put_back(self) -> None:
        source, before, now = self._source, self._before, _seen(self._source)
        keys = now.keys() | before.keys()
        changed = [key for key in keys if not same(now.get(key, ABSENT), before.get(key, ABSENT))]
        if changed and isinstance(source, Content):
            source.replace(before)
            return
        for key in changed:
            with suppress(AttributeError):  # of objects written in C, read only
                source.restore(key, before.get(key, ABSENT))


def _seen(source: Source) -> dict[Any, Any]:
    seen = dict(source.now())
    if isinstance(source, Entries):
        seen |= {name: source.entries[name] for name in source.overwritten if name in source.entries}
    return seen


class _Value:
    """The bits of what this process has of a tensor, whether it requires grad, its gradient and the bits of that."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bits, self._requires_grad = part_of(tensor).detach().clone(), tensor.requires_grad
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._bits_of_gradient = None if self._gradient is None else part_of(self._gradient).detach().clone()

    def put_back(self, tensor: torch.Tensor) -> None:
        """Only what differs is written: a pending backward() of the user's stays valid."""
        with torch.no_grad():
            if (part := part_of(tensor)).shape != self._bits.shape:
                part.resize_(self._bits.shape)
            if not same_bits(part, self._bits):
                part.detach().copy_(self._bits)
            if self._bits_of_gradient is not None:
                gradient = part_of(self._gradient)
                if not same_bits(gradient, self._bits_of_gradient):
                    gradient.detach().copy_(self._bits_of_gradient)
        if tensor.is_leaf:
            if tensor.requires_grad is not self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient


def _keep_scheduler(snapshot: Snapshot, scheduler: Any) -> None:
    """A scheduler, and those that it is made of."""
    if not isinstance(scheduler, LRScheduler):
        return
    snapshot.add_object("scheduler", scheduler)
    for value in vars(scheduler).values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            _keep_scheduler(snapshot, item)


def _tensors(item: Any) -> list[torch.Tensor]:
    found = tensors_in(item, (Mapping, list, tuple, set, deque), _DEPTH)
    return [tensor for tensor in found if tensor.layout is torch.strided]
