"""The content of a place after a step, as each step makes it anew: of tensors it computes, of what was there, of constants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.effects.python_objects.records import Written, has_memory
from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.sources.places import Content, Source
from monograph.capture.guards.sources.values import ABSENT, is_immutable
from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.fakes import is_fake
from monograph.compat.tensors import storage_key
from monograph.ir.call.tree import Tree, flatten, unflatten
from monograph.ir.graph_signature import Argument, Assign, Write


@dataclass(frozen=True)
class _Old:
    """What was at another key, or at this one, when the step began."""

    key: Any


@dataclass(frozen=True)
class _Slot:
    """A tensor or number that the step computes."""

    index: int


@dataclass(frozen=True)
class _Made:
    """A value made anew of slots and of what is the same at each step."""

    tree: Tree
    leaves: tuple[Any, ...]

    def value(self, computed: list[Any]) -> Any:
        """The value for one step."""
        leaves = (computed[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves)
        return unflatten(self.tree, leaves)


def kept_in(item: Any) -> Iterator[Any]:
    """What is in an entry of a content and the same at each step."""
    if isinstance(item, _Made):
        yield from (leaf for leaf in item.leaves if not isinstance(leaf, _Slot))
    elif not isinstance(item, _Old):
        yield item


def value_of(item: Any, before: Mapping[Any, Any], computed: list[Any]) -> Any:
    """An entry of a content for one step; `before` is what the place held, `computed` what the step has made."""
    if isinstance(item, _Made):
        return item.value(computed)
    return before.get(item.key, ABSENT) if isinstance(item, _Old) else item


class StoredContent:
    """Finds how the content of one place is made. `own` are the keys of the storages that inputs have."""

    def __init__(self, source: Source, inputs: Inputs, own: Collection[int], written: Written) -> None:
        self.source, self._inputs, self._own, self._written = source, inputs, own, written
        self.computed: list[Any] = []  # gets what the step computes when it has run
        self.state_outputs: list[StateOutput] = []  # what the program must compute for the tensors
        self.writes: list[Write] = []  # of numbers that move
        self.shown = set[int]()  # ids of tensors from outside on whose memory some are

    def entries(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any] | None:
        """What `value_of` understands, by key: of a container all of it, else the entries that change.

        None if a part of it cannot be made again.
        """
        whole = isinstance(self.source, Content)
        places = {id(value): key for key, value in before.items()}
        content: dict[Any, Any] = {}
        for key in [*after, *(key for key in before if key not in after and not whole)]:
            value = after.get(key, ABSENT)
            if not whole and before.get(key, ABSENT) is value:
                continue
            if id(value) in places and value is not ABSENT and not is_immutable(value):
                content[key] = _Old(places[id(value)])
            elif value is ABSENT or (is_immutable(value) and not holds_fakes(value)):
                content[key] = value
            else:
                made = self._made(f"{self.source.label}[{key!r}]", value)
                if made is None:
                    return None
                content[key] = made
        return content

    def _made(self, label: str, value: Any) -> _Made | None:
        found: list[Any] = []
        tree = flatten(value, found)
        leaves: list[Any] = []
        for leaf in found:
            if isinstance(leaf, torch.Tensor) and is_fake(leaf):
                if (real := self._inputs.real_of(leaf)) is not None:
                    leaves.append(real)
                elif (slot := self._slot(label, leaf)) is not None:
                    leaves.append(slot)
                else:
                    return None
            elif is_moving(leaf):
                leaves.append(_Slot(len(self.computed)))
                self.writes.append(self._written(self.computed, len(self.computed), label, leaf))
                self.computed.append(None)
            elif is_immutable(leaf) or id(leaf) in self._inputs.by_real:  # a key among them
                leaves.append(leaf)
            else:
                return None
        return _Made(tree, tuple(leaves))

    def _note_whose(self, leaf: torch.Tensor) -> None:
        """Note the tensors from outside that this one shows."""
        if (memory := storage_key(leaf)) in self._own:
            shown = {real: fake for real, fake in self._inputs.by_real.items() if has_memory(fake)}
            self.shown |= {real for real, fake in shown.items() if storage_key(fake) == memory}

    def _slot(self, label: str, leaf: torch.Tensor) -> _Slot | None:
        """A place among the computed tensors; None for one that has no strides."""
        item, number = self._inputs.by_fake.get(id(leaf)), len(self.computed)
        argument = item.source.index if item is not None and isinstance(item.source, Argument) else None
        if argument is None and leaf.layout is not torch.strided:
            return None
        if argument is None:
            self._note_whose(leaf)
        target = Assign(self.computed, number, leaf.requires_grad, argument)
        self.state_outputs.append(StateOutput(leaf.detach(), target, f"{label}{number or ''}"))
        self.computed.append(None)
        return _Slot(number)
