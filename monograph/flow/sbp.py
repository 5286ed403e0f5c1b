"""How the processes of a placement share a tensor: split along a dimension, the same on each, or summands.

In one process these are names without effect; tensors over several processes are not here yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from monograph import DistributedError


@dataclass(frozen=True)
class sbp:  # OneFlow's name
    """One of `split(dim)`, `broadcast` and `partial_sum`."""

    kind: str
    dim: int | None = None

    def __call__(self) -> sbp:
        """Itself: OneFlow's `broadcast` may be written with parentheses."""
        return self

    def __repr__(self) -> str:
        name = f"{self.kind}(dim={self.dim})" if self.dim is not None else self.kind
        return f"flow.sbp.{name}"


broadcast = sbp("broadcast")
partial_sum = sbp("partial_sum")


def split(dim: int) -> sbp:
    """Parts of equal size along a dimension."""
    return sbp("split", dim)


def check_alone() -> None:
    """Raise DistributedError in one of several processes that a launcher has started: each would train by itself."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count not in ("", "1"):
        raise DistributedError(
            f"a launcher has started {count} processes, and tensors over several processes are not here yet",
            hint="start the script by itself",
        )


class placement:  # OneFlow's name
    """Devices that hold a tensor: a type such as "cpu" or "cuda", and the ranks of their processes.

    There is one process, of rank 0. Raises DistributedError for others.

    >>> placement("cpu", ranks=[0])
    flow.placement(type='cpu', ranks=[0])
    """

    def __init__(self, type: str, ranks: int | Sequence[int] | Sequence[Sequence[int]]) -> None:
        torch.device(type)  # refuses what is no device
        self.type, self.ranks = type, ranks
        check_alone()
        if others := sorted({rank for rank in _flat(ranks) if rank != 0}):
            raise DistributedError(
                f"placement({type!r}, {ranks}) names the ranks {others}, and there is one process, of rank 0",
                hint="tensors over several processes are not here yet; use ranks=[0]",
            )

    @staticmethod
    def all(type: str) -> placement:
        """Every process: the one of rank 0."""
        return placement(type, [0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, placement) and self.type == other.type

    def __hash__(self) -> int:
        return hash(self.type)

    def __repr__(self) -> str:
        return f"flow.placement(type={self.type!r}, ranks={self.ranks})"


def to_global(input: torch.Tensor, placement: placement | None = None, sbp: object = None) -> torch.Tensor:
    """The tensor on the devices of a placement: in one process it is the tensor itself, moved to the device."""
    return input if placement is None else input.to(placement.type)


def to_local(input: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor: in one process the tensor itself."""
    return input


def _flat(ranks: object) -> Iterable[int]:
    if isinstance(ranks, Mapping):  # machines and their devices, as OneFlow wrote it once
        yield from ranks
        yield from _flat(ranks.values())
    elif isinstance(ranks, Iterable):
        for item in ranks:
            yield from _flat(item)
    else:
        yield int(ranks)  # type: ignore[call-overload]
