"""What each rank will write: its shards, and of what all ranks have alike, a part."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from monograph.checkpoint.bytes import on_host, row_of
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.flatten import Flat
from monograph.checkpoint.leaves import Json
from monograph.checkpoint.manifest import own_row
from monograph.checkpoint.tensor_file import bytes_of
from monograph.checkpoint.write import Parts


@dataclass(frozen=True)
class Said:
    """What the coordinator gets to know of a rank, besides its plan."""

    tree: bytes  # JSON, compressed
    about: Mapping[str, Any]
    plain: Mapping[str, object]  # form and digest of each tensor that is not spread


@dataclass(frozen=True)
class Described:
    """What the manifest will say of the ranks."""

    about: Mapping[str, Any]
    trees: tuple[Json, ...]
    tree_of: tuple[int, ...]
    own: frozenset[str]


def local_of(value: object) -> torch.Tensor | None:
    """The part of a DTensor that this process has; None for anything else."""
    if not isinstance(value, DTensor):
        return None
    with torch.no_grad():
        local: torch.Tensor = value.to_local()
        return local


class StatePlanner(DefaultSavePlanner):
    """Plans by names of tensors as the tree has them. No value is pickled: what is not a tensor is in the tree.

    What is not spread over ranks is compared: what differs, such as the state of random generators, each rank saves.
    """

    def __init__(self, take_apart: Callable[[], Parts]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._take_apart = take_apart
        self.is_coordinator = False
        self.parts: Parts  # once it is taken apart
        self._tensors: dict[str, torch.Tensor] = {}  # what this rank has of each
        self._is_taken = False
        self._trouble: Exception | None = None
        self.described: Described  # on the coordinator, once all have planned

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator
        if not self._is_taken:
            self.take()
        if self._trouble is not None:
            raise self._trouble

    def take(self, *, copy: bool = False) -> None:
        """Take the state apart now, if need be into a copy. What goes wrong is raised when all ranks plan."""
        self._is_taken = True
        try:
            self._take(copy=copy)
        except Exception as error:
            self._trouble = error

    def _take(self, *, copy: bool) -> None:
        self.parts = self._take_apart()
        tensors = self.parts.flat.tensors
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor) and any(isinstance(item, Partial) for item in tensor.placements):
                raise Refused(f"{name} holds partial sums", "redistribute it first")
            local = local_of(tensor)
            self._tensors[name] = tensor if local is None else local
            if copy:
                row = row_of(name, self._tensors[name])
                self._tensors[name] = on_host(self._tensors[name], row, copy=True)
        plan = create_default_local_save_plan(dict(tensors), self.is_coordinator)
        tree = zlib.compress(json.dumps(self.parts.flat.tree, separators=(",", ":")).encode(), 1)
        plain = {
            name: _form_and_digest(self._tensors[name])
            for name, tensor in tensors.items()
            if not isinstance(tensor, DTensor)
        }
        items = [item for item in plan.items if not _is_empty_part(item)]
        self.plan = replace(plan, items=items, planner_data=Said(tree, self.parts.about, plain))
        if copy:
            self.parts.check_unchanged()
            self.parts = replace(self.parts, flat=Flat(self.parts.flat.tree, {}), versions={})

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        said: list[Said] = [plan.planner_data for plan in all_plans]
        _check_alike(all_plans)
        own = _different(said)
        texts = list(dict.fromkeys(item.tree for item in said))
        trees = tuple(json.loads(zlib.decompress(text)) for text in texts)
        self.described = Described(
            said[0].about, trees, tuple(texts.index(item.tree) for item in said), frozenset(own)
        )
        plans = [
            replace(plan, items=[_renamed(item, rank, own) for item in plan.items], planner_data=None)
            for rank, plan in enumerate(all_plans)
        ]
        names = {item.index.fqn for plan in all_plans for item in plan.items}
        taken = {own_row(name, rank) for name in own for rank in range(len(plans))} & names
        if taken:
            raise Refused(f"{taken.pop()!r} would be the name of two tensors", "rename one of them")
        return super().create_global_plan(plans)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """What this rank has of a tensor; its own may have a name with its number."""
        own, _, _ = index.fqn.rpartition("@")
        return self._tensors[index.fqn if index.fqn in self._tensors else own]


def _form_and_digest(tensor: torch.Tensor) -> object:
    row = row_of("", tensor)
    host = on_host(tensor, row)  # its memory is there as long as it is
    return str(row.dtype), row.shape, row.stride, hashlib.sha256(bytes_of(host)).digest()


def _is_empty_part(item: WriteItem) -> bool:
    """True for the shard of a rank that a dimension is too short for."""
    data = item.tensor_data
    return (
        item.type == WriteItemType.SHARD
        and data is not None
        and math.prod(data.chunk.sizes) == 0
        and math.prod(data.size) > 0
    )


def _different(said: Sequence[Said]) -> set[str]:
    """The plain tensors that are not the same on all ranks that have them."""
    values: defaultdict[str, set[object]] = defaultdict(set)
    for item in said:
        for name, value in item.plain.items():
            values[name].add(value)
    return {name for name, found in values.items() if len(found) > 1}


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """`Refused` if a tensor is spread over some ranks, and whole or of another form on another."""
    first: dict[str, tuple[int, object]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            is_shard = item.type == WriteItemType.SHARD
            form = (is_shard, data.size, data.properties.dtype) if is_shard and data is not None else False
            other, before = first.setdefault(item.index.fqn, (rank, form))
            if form != before:
                raise Refused(
                    f"{item.index.fqn} is another tensor on rank {rank} than on rank {other}",
                    "distribute it alike on all ranks",
                )


def _renamed(item: WriteItem, rank: int, own: set[str]) -> WriteItem:
    name = item.index.fqn
    return replace(item, index=_named(item.index, own_row(name, rank))) if name in own else item


def _named(index: MetadataIndex, name: str) -> MetadataIndex:
    """The same place in a tensor of another name."""
    return MetadataIndex(name, index.offset, index.index)
