"""The processes of a plan in a grid, as a DeviceMesh has them, and which of them have parts of the same sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from monograph.errors import DistributedError

_COPIES: Final = "replicate"
_MOST_BETWEEN: Final = 2  # kinds of ranks that are planned besides the first and the last


@dataclass(frozen=True)
class Mesh:
    """Names and sizes of its dimensions. Ranks are counted along the last one first; parts of tensors are spread over that."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of processes."""
        return prod(self.sizes)

    def along(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The dimensions along which ranks differ."""
        columns = zip(*map(self._coordinates, ranks), strict=True)
        return tuple(dim for dim, column in enumerate(columns) if len(set(column)) > 1)

    def label(self, ranks: Collection[int]) -> str:
        """The names of these dimensions, as `shard` or `replicate x shard`."""
        return " x ".join(self.names[dim] for dim in self.along(ranks)) or self.names[-1]

    def like(self, ranks: Sequence[int], rank: int) -> tuple[int, ...]:
        """The ranks of the group of `rank` along the dimensions along which these differ."""
        fixed = set(range(len(self.sizes))) - set(self.along(ranks))
        own = self._coordinates(rank)
        wanted = [{own[dim]} if dim in fixed else range(size) for dim, size in enumerate(self.sizes)]
        found = [0]
        for size, places in zip(self.sizes, wanted, strict=True):
            found = [number * size + place for number in found for place in sorted(places)]
        return tuple(found)

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        found: list[int] = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            found.insert(0, place)
        return tuple(found)


def mesh_of(world_size: Any, mesh: Any, name: str = "data") -> Mesh:
    """The mesh that a user means: sizes, or a dict of names to sizes; `name` is that of the parts. Raises DistributedError."""
    if type(world_size) is not int or world_size < 2:
        raise DistributedError(
            f"plan(world_size={world_size!r}): a plan is for two processes at least",
            hint="graph.memory() plans the step of one",
        )
    if mesh is None:
        mesh = (world_size,)
    named = dict(mesh) if isinstance(mesh, Mapping) else None
    sizes = tuple(mesh if named is None else named.values())
    if not all(type(size) is int and size > 0 for size in sizes) or len(sizes) not in (1, 2):
        raise DistributedError(
            f"plan(mesh={mesh!r}): a mesh has one or two dimensions, of ints from 1 on",
            hint='mesh=(128, 8), or mesh={"replicate": 128, "shard": 8}',
        )
    names = (name,) if len(sizes) == 1 else (_COPIES, "shard" if name == "data" else name)
    made = Mesh(names if named is None else tuple(map(str, named)), sizes)
    if made.size != world_size:
        raise DistributedError(
            f"plan(mesh={mesh!r}): such a mesh has {made.size} processes, and world_size={world_size}",
            hint="let the product of the sizes be world_size",
        )
    return made


def kinds_of_ranks(mesh: Mesh, rows: Collection[int]) -> Mapping[int, int]:
    """The ranks to plan, and for each how many are like it, or hold less: parts of so many rows are all that differs.

    The first rank holds the most, the last the least.
    """
    count = mesh.sizes[-1]
    kinds: dict[tuple[int, ...], list[int]] = {}
    for place in range(count):
        kinds.setdefault(tuple(_rows(size, count, place) for size in sorted(rows)), []).append(place)
    first, *between, last = groups if len(groups := [*kinds.values()]) > 1 else (groups[0], groups[0])
    chosen = [
        between[index * len(between) // _MOST_BETWEEN] for index in range(min(len(between), _MOST_BETWEEN))
    ]
    replicas = mesh.size // count
    found: dict[int, int] = {0: len(first) * replicas}
    for group in between:
        if group in chosen:
            found[group[0]] = 0
        found[[*found][-1]] += len(group) * replicas
    if first is last:
        return {0: mesh.size - 1, mesh.size - 1: 1}
    return {**found, mesh.size - 1: len(last) * replicas}


def _rows(size: int, count: int, place: int) -> int:
    share = -(-size // count)
    return max(0, min(share, size - share * place))
