"""Containers and objects of plain values in which some are computed by the step: numbers out of tensors, and new tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.capture.effects.containers import containers_in, objects_in
from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.sources.values import is_immutable
from monograph.capture.numbers.moving import is_moving
from monograph.compat.fakes import is_fake
from monograph.compat.tensors import storage_key
from monograph.ir.call.tree import LEAF, Tree, flatten, leaf_paths, unflatten
from monograph.ir.graph_signature import Assign, Write

Written = Callable[
    [Any, Any, str, Any], Write
]  # container, key, label, number: the write of a number that moves


@dataclass(frozen=True)
class Record:
    """The form and the leaves of one. What the step computes comes into `leaves` when it has run."""

    tree: Tree
    leaves: list[Any]
    computed: Sequence[int]

    def made(self) -> Any:
        """A new one with the leaves of this step, which are let go of."""
        item = unflatten(self.tree, iter(self.leaves))
        for index in self.computed:
            self.leaves[index] = None
        return item


@dataclass(frozen=True)
class SetRecord:
    """An attribute that gets one from each step."""

    label: str
    table: dict[str, Any]
    name: str
    record: Record

    def apply(self) -> None:
        """As after the step."""
        self.table[self.name] = self.record.made()

    def objects(self) -> Iterator[Any]:
        """What it changes, and what it puts there."""
        yield self.table
        yield from objects_in(self.record.leaves)


def is_record(item: Any, own: Collection[int]) -> bool:
    """True for a container of plain values and of others that the step computes, and for an object with such attributes.

    New tensors are those whose memory is not among `own`; each has memory of its own.
    """
    leaves: list[Any] = []
    if flatten(item, leaves, ()) == LEAF:
        return False
    tensors = [leaf for leaf in leaves if is_new_tensor(leaf, own)]
    known = [is_moving(leaf) or is_immutable(leaf) for leaf in leaves]
    is_computed = bool(tensors) or any(map(is_moving, leaves))
    memory = {storage_key(tensor) for tensor in tensors}
    return is_computed and sum(known) + len(tensors) == len(leaves) and len(memory) == len(tensors)


def is_new_tensor(item: Any, own: Collection[int]) -> bool:
    """True for a tensor that the step makes, on memory that is not among `own`."""
    return is_fake(item) and has_memory(item) and storage_key(item) not in own


def has_memory(item: Any) -> bool:
    """True for a tensor that is not made of others."""
    return isinstance(item, torch.Tensor) and item.layout is torch.strided


def record_of(item: Any, label: str, written: Written) -> tuple[Record, list[Write], list[StateOutput]]:
    """One as a record, and what the program must compute for it."""
    leaves: list[Any] = []
    tree = flatten(item, leaves, ())
    assert tree != LEAF
    computed = [index for index, leaf in enumerate(leaves) if is_moving(leaf) or is_fake(leaf)]
    writes, outputs = [], []
    for index, path in enumerate(leaf_paths(tree, label)):
        leaf = leaves[index]
        if is_moving(leaf):
            writes.append(written(leaves, index, path, leaf))
        elif is_fake(leaf):
            outputs.append(StateOutput(leaf.detach(), Assign(leaves, index, leaf.requires_grad), path))
            leaves[index] = None
    return Record(tree, leaves, computed), writes, outputs


def changeable(items: Iterable[Any]) -> Iterator[int]:
    """The ids of the lists and dicts in some values, again for each place where one is."""
    for item in items:
        yield from (id(found) for found in containers_in(item) if not isinstance(found, tuple))
