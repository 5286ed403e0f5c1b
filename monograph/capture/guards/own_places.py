"""Places where each step puts a new tensor: what is there belongs to the graph alone.

In eager mode who kept the tensor of an earlier step still has its numbers. A replay writes into one tensor instead of
making a new one. Nobody can notice, as long as nobody else has that tensor. Once somebody does, a copy takes its place.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import gt
from typing import Any

import torch

from monograph.compat.torch import hidden_from_dispatch_modes, storage_key, users_of_storage
from monograph.ir.call.tree import flatten, unflatten


@dataclass(frozen=True)
class OwnPlace:
    """An attribute, or an entry of a dict or list; if `leaves` are given, these tensors inside the value that is there."""

    container: Any
    key: Any
    path: str
    leaves: tuple[int, ...] | None = None

    def get(self) -> Any:
        """What is there now, None if nothing is."""
        try:
            return self.container[self.key]
        except LookupError:
            return None

    def tensors(self) -> list[Any]:
        """The tensors there that steps replace."""
        value = self.get()
        if self.leaves is None:
            return [value]
        found: list[Any] = []
        flatten(value, found)
        return [found[index] if index < len(found) else None for index in self.leaves]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What is there, with other tensors."""
        if self.leaves is None:
            return tensors[0]
        value, found = self.get(), list[Any]()
        tree = flatten(value, found)
        if all(found[index] is tensor for index, tensor in zip(self.leaves, tensors, strict=True)):
            return value
        for index, tensor in zip(self.leaves, tensors, strict=True):
            found[index] = tensor
        return unflatten(tree, iter(found))


@dataclass
class _Own:
    place: OwnPlace
    value: Any = None  # what the graph put there
    tensors: Sequence[torch.Tensor] = ()
    users: Sequence[int] | None = None  # when nobody else had them

    def take(self) -> None:
        """What is there now is the graph's."""
        self.value, self.tensors, self.users = self.place.get(), self.place.tensors(), None

    def counted(self) -> list[int]:
        """How many users there are of each thing."""
        things = [self.value, *self.tensors]
        return [*map(sys.getrefcount, things), *map(users_of_storage, self.tensors)]


class OwnPlaces:
    """The places of one graph, with what it put there."""

    def __init__(self) -> None:
        self._owns: dict[tuple[int, Any], _Own] = {}
        self._parted: list[tuple[_Own, Any]] = []  # in this call, with what was there
        self._uncounted = False
        self._has_new = False  # builds that were not there at the last count

    def add(self, places: Iterable[OwnPlace]) -> None:
        """Know the places of a new build, which hold its own tensors."""
        for place in places:
            self._owns[id(place.container), place.key] = own = _Own(place)
            own.take()
            self._has_new = True
        self.recount()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the graph put there."""
        return [tensor for own in self._owns.values() if own.value is not None for tensor in own.tensors]

    def recount(self) -> None:
        """Builds were made, bound to other tensors or let go: they are users too."""
        self._uncounted = bool(self._owns)

    def part(self, others: Callable[[], Collection[torch.Tensor]]) -> None:
        """Put copies wherever somebody else has what is there. `others` are tensors that may share its memory."""
        self._parted.clear()
        for own in self._owns.values():
            if own.place.get() is own.value and self._is_alone(own):  # no name here for it: that would count
                continue
            own.value, before, tensors = None, own.place.get(), own.place.tensors()
            if all(map(_can_be_copied, tensors)) and not _share(tensors, others()):
                with hidden_from_dispatch_modes():
                    copies = [tensor.detach().clone() for tensor in tensors]
                own.place.container[own.place.key] = own.place.with_tensors(copies)
                own.take()
                self._parted.append((own, before))
                self._uncounted = True
            del before, tensors

    def roll_back(self) -> None:
        """Put back what was there when the call began: it has failed."""
        for own, before in self._parted:
            if own.value is not None and own.place.get() is own.value:
                own.place.container[own.place.key] = before
                own.value = None
        self._parted.clear()

    def count(self) -> None:
        """Take who has the tensors now for the graph itself."""
        self._parted.clear()
        if not self._uncounted:
            return
        self._uncounted = False
        if self._has_new:  # what is left of a capture has them too, until it is cleared away
            gc.collect()
            self._has_new = False
        for own in self._owns.values():
            own.users = None if own.value is None else own.counted()

    def _is_alone(self, own: _Own) -> bool:
        if own.value is None:
            return True
        users = own.counted()
        if own.users is None or any(map(gt, users, own.users)):
            return False
        own.users = users  # the graph itself lets go of some
        return True


def _can_be_copied(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad


def _share(tensors: Sequence[torch.Tensor], others: Collection[torch.Tensor]) -> bool:
    known, memory = set(map(id, tensors)), set(map(storage_key, tensors))
    return any(id(item) not in known and storage_key(item) in memory for item in others)
