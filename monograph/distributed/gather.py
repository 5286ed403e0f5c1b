"""Whole parameters of shards, and shards of their gradients: by collectives that are ordinary ops, each padded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from monograph.compat.distributed.fully_shard import Inner
from monograph.compat.distributed.groups import shared_name
from monograph.compat.distributed.tensors import local_of, split_dim, with_local
from monograph.distributed.averages import added

_c10d: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class Cast:
    """The types by which values are gathered and gradients reduced; None where nothing is cast."""

    values: torch.dtype | None = None
    gradients: torch.dtype | None = None


def _all_of_it(gradient: torch.Tensor) -> torch.Tensor | None:
    return gradient


def gathered(
    sharded: Any,
    inner: Inner | None = None,
    cast: Cast | None = None,
    summed: Callable[[torch.Tensor], torch.Tensor | None] = _all_of_it,
) -> torch.Tensor:
    """The whole of a DTensor of which processes with other batches hold the parts, and copies.

    Backward takes the mean of their gradients, and leaves each its part. With `inner` the whole is a DTensor itself, over the
    other dimensions of the mesh. `summed` gives what is averaged of a gradient that is there now; None leaves nothing yet.
    """
    apply: Any = _Gathered.apply
    made: torch.Tensor = apply(sharded, inner, cast or Cast(), summed)
    return made


def kept_whole(part: Any, whole: torch.Tensor) -> torch.Tensor:
    """A parameter that all have whole, of which `part` is what this process updates: as that which is gathered."""
    apply: Any = _Kept.apply
    made: torch.Tensor = apply(part, whole)
    return made


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Any, whole: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = mean_part(gradient, ctx.part)
        return with_local(ctx.part, part, requires_grad=False), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: Any, inner: Inner | None, cast: Cast, summed: Any) -> Any:
        ctx.sharded, ctx.dtype, ctx.inner, ctx.cast, ctx.summed = sharded, sharded.dtype, inner, cast, summed
        local = local_of(sharded)
        whole = whole_of(local if cast.values is None else local.to(cast.values), sharded, inner)
        return whole if inner is None else inner.around(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        if ctx.inner is not None:
            gradient = ctx.inner.local_gradient(gradient)
        wanted = ctx.cast.gradients
        total = ctx.summed(gradient if wanted is None else gradient.to(wanted))
        if total is None:
            return None, None, None, None
        part = mean_part(total, ctx.sharded, ctx.inner)
        return with_local(ctx.sharded, part.to(ctx.dtype), requires_grad=False), None, None, None


@dataclass(frozen=True)
class _Axis:
    """A dimension of a mesh over processes with other batches: a group of so many, of which this one is at a place.

    Each has rows of the dimension `dim`, which has so many in all; None if each has all.
    """

    group: str
    count: int
    place: int
    dim: int | None
    size: int

    @property
    def most(self) -> int:
        """The rows of the first process."""
        return -(-self.size // self.count)

    @property
    def rows(self) -> int:
        """The rows of this process."""
        return max(0, min(self.most, self.size - self.most * self.place))


def _axes(like: Any, inner: Inner | None) -> Iterator[_Axis]:
    mesh, shape = like.device_mesh, like.shape if inner is None else inner.shape
    for mesh_dim in range(mesh.ndim if inner is None else mesh.ndim - inner.num_dims):
        dim = split_dim(like.placements[mesh_dim])
        group, place = shared_name(mesh.get_group(mesh_dim)), int(mesh.get_local_rank(mesh_dim))
        yield _Axis(group, int(mesh.size(mesh_dim)), place, dim, 0 if dim is None else int(shape[dim]))


def whole_of(local: torch.Tensor, like: Any, inner: Inner | None = None) -> torch.Tensor:
    """Put parts together, laid out over processes as the DTensor `like`."""
    for axis in reversed([*_axes(like, inner)]):
        if axis.dim is not None:
            moved = _padded(local.movedim(axis.dim, 0), axis.most).contiguous()
            whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(moved, axis.count, axis.group))
            local = whole[: axis.size].movedim(0, axis.dim)
    return local.clone() if local is local_of(like) else local


def mean_part(gradient: torch.Tensor, like: Any, inner: Inner | None = None) -> torch.Tensor:
    """This process's part of the mean of a whole gradient over the processes that have other batches."""
    axes = [*_axes(like, inner)]
    split, copies = ([item for item in axes if (item.dim is None) is whole] for whole in (False, True))
    for axis in split:
        assert axis.dim is not None
        moved = _padded(gradient.movedim(axis.dim, 0), axis.most * axis.count).contiguous()
        part = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(moved, "sum", axis.count, axis.group))
        if axis is split[-1]:  # before it is cut: all processes add as many numbers
            part = _added(part, copies)
        gradient = part[: axis.rows].movedim(0, axis.dim)
    return (gradient if split else _added(gradient, copies)) / prod(axis.count for axis in axes)


def _added(gradient: torch.Tensor, copies: Sequence[_Axis]) -> torch.Tensor:
    for axis in copies:
        gradient = added(gradient.contiguous(), axis.group)
    return gradient


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - int(tensor.shape[0])
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor
