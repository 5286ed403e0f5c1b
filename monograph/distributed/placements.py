"""Which ranks hold a tensor, by OneFlow's word. A DeviceMesh is made of it when a tensor is put there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from monograph.compat.distributed.groups import NoMesh, has_group, mesh_over, num_processes
from monograph.errors import DistributedError

Ranks = int | Sequence[int] | Sequence[Sequence[int]] | Mapping[int, Sequence[int]]


class placement:  # OneFlow's name
    """Devices of one type, "cpu" or "cuda", in processes of these ranks; nested ranks are a mesh of several dimensions.

    Raises DistributedError for a rank that no process has.

    >>> placement("cpu", ranks=[0])
    placement(type="cpu", ranks=[0])
    """

    def __init__(self, type: str, ranks: Ranks) -> None:
        torch.device(type)  # refuses what is no device
        self.begin()
        self.type, self._ranks = type, _nested(ranks)
        count = num_processes()
        if others := sorted({rank for rank in _flat(self._ranks) if not 0 <= rank < count}):
            there = "there is one process, of rank 0" if count == 1 else f"there are {count} processes"
            raise DistributedError(
                f"placement({type!r}, {ranks}) names the ranks {others}, and {there}",
                hint=f"use ranks={list(range(count))}, or start more processes with torchrun",
            )

    @staticmethod
    def begin() -> None:
        """Raise DistributedError in one of several processes that have not found each other."""
        check_started()

    @classmethod
    def all(cls, type: str) -> Self:
        """Every process."""
        cls.begin()
        return cls(type, range(num_processes()))

    @classmethod
    def of(cls, mesh: Any) -> Self:
        """The placement of a DeviceMesh."""
        return cls(mesh.device_type, mesh.mesh.tolist())

    @property
    def ranks(self) -> list[Any]:
        """The ranks, in lists that are nested as the mesh is."""
        return [list(item) if isinstance(item, tuple) else item for item in self._ranks]

    @property
    def hierarchy(self) -> tuple[int, ...]:
        """The shape of the mesh."""
        rows, first = len(self._ranks), self._ranks[0]
        return (rows, len(first)) if isinstance(first, tuple) else (rows,)

    @property
    def mesh(self) -> Any:
        """The DeviceMesh. The first time all processes have to ask for it: they make its groups together."""
        if not has_group():
            raise DistributedError(
                f"{self!r} in a process without a group",
                hint="call torch.distributed.init_process_group() first",
            )
        try:
            return mesh_over(self.type, self._ranks)
        except NoMesh as why:
            raise DistributedError(
                f"{self!r} has ranks that do not ascend, and {why}",
                hint="let ranks ascend along each dimension, and leave out dimensions of one rank",
            ) from None

    def __iter__(self) -> Iterator[int]:
        return _flat(self._ranks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, placement) and (self.type, self._ranks) == (other.type, other._ranks)

    def __hash__(self) -> int:
        return hash((self.type, self._ranks))

    def __repr__(self) -> str:
        return f'placement(type="{self.type}", ranks={self.ranks})'


def num_launched() -> int:
    """How many processes a launcher says that it has started."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def check_started() -> None:
    """Raise DistributedError in one of several processes that a launcher has started, if they have not found each other."""
    if num_launched() > 1 and not has_group():
        raise DistributedError(
            f"a launcher has started {num_launched()} processes, which have not found each other",
            hint="call torch.distributed.init_process_group() first",
        )


def _nested(ranks: Ranks) -> tuple[Any, ...]:
    if isinstance(ranks, Mapping):  # machines and their devices, as OneFlow wrote it once
        if list(ranks) != [0]:
            raise DistributedError(
                f"a placement of the machines {list(ranks)}: ranks count through all machines",
                hint="placement(type, ranks=[0, 1, ...])",
            )
        ranks = ranks[0]
    if isinstance(ranks, Iterable):
        found = tuple([tuple(map(int, item)) if isinstance(item, Iterable) else int(item) for item in ranks])
    else:
        found = (int(ranks),)
    kinds = {len(item) if isinstance(item, tuple) else 0 for item in found}
    flat = list(_flat(found))
    if len(kinds) != 1 or not flat or len({*flat}) != len(flat):
        raise DistributedError(
            f"ranks={ranks} are no mesh: rows of one length, and each rank once, are needed",
            hint="ranks=[0, 1], or ranks=[[0, 1], [2, 3]]",
        )
    return found


def _flat(ranks: tuple[Any, ...]) -> Iterator[int]:
    for item in ranks:
        yield from item if isinstance(item, tuple) else (item,)
