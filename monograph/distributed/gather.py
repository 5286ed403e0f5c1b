"""Whole parameters of shards, and shards of their gradients: by collectives that are ordinary ops, each padded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monograph.compat.distributed.groups import shared_name
from monograph.compat.distributed.tensors import local_of, with_local
from monograph.distributed.averages import added

_c10d: Any = torch.ops._c10d_functional


def gathered(
    sharded: Any, dtype: torch.dtype | None = None, gradient_type: torch.dtype | None = None
) -> torch.Tensor:
    """The whole of a DTensor of which processes with other batches hold the parts, and copies.

    Backward takes the mean of their gradients, and leaves each its part. Values are gathered as `dtype`, gradients reduced as
    `gradient_type`.
    """
    apply: Any = _Gathered.apply
    made: torch.Tensor = apply(sharded, dtype, gradient_type)
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
    def forward(
        ctx: Any, sharded: Any, dtype: torch.dtype | None, gradient_type: torch.dtype | None
    ) -> torch.Tensor:
        ctx.sharded, ctx.dtype, ctx.gradient_type = sharded, sharded.dtype, gradient_type
        local = local_of(sharded)
        return whole_of(local if dtype is None else local.to(dtype), sharded)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = mean_part(
            gradient if ctx.gradient_type is None else gradient.to(ctx.gradient_type), ctx.sharded
        )
        return with_local(ctx.sharded, part.to(ctx.dtype), requires_grad=False), None, None


def whole_of(local: torch.Tensor, like: Any) -> torch.Tensor:
    """Put parts together, laid out over processes as the DTensor `like`."""
    for mesh_dim, dim, size in reversed(_shards(like)):
        count, group = _group(like, mesh_dim)
        rows = -(-size // count)
        moved = _padded(local.movedim(dim, 0), rows).contiguous()
        whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(moved, count, group))
        local = whole[:size].movedim(0, dim)
    return local.clone() if local is local_of(like) else local


def mean_part(gradient: torch.Tensor, like: Any) -> torch.Tensor:
    """This process's part of the mean of a whole gradient over the processes of the mesh of `like`."""
    shards = _shards(like)
    factor = 1
    for mesh_dim, dim, size in shards:
        count, group = _group(like, mesh_dim)
        rows, factor = -(-size // count), factor * count
        moved = _padded(gradient.movedim(dim, 0), rows * count).contiguous()
        part = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(moved, "sum", count, group))
        gradient = part[: _rows_here(like, mesh_dim, size)].movedim(0, dim)
    for mesh_dim in set(range(like.device_mesh.ndim)) - {mesh_dim for mesh_dim, _, _ in shards}:
        count, group = _group(like, mesh_dim)
        factor *= count
        gradient = added(gradient.contiguous(), group)
    return gradient / factor


def _shards(like: Any) -> Sequence[tuple[int, int, int]]:
    """The dimensions of the mesh along which a DTensor is in parts, with its own dimension for each and the size of that."""
    return [
        (mesh_dim, placement.dim, int(like.shape[placement.dim]))
        for mesh_dim, placement in enumerate(like.placements)
        if placement.is_shard()
    ]


def _group(like: Any, mesh_dim: int) -> tuple[int, str]:
    mesh = like.device_mesh
    return int(mesh.size(mesh_dim)), shared_name(mesh.get_group(mesh_dim))


def _rows_here(like: Any, mesh_dim: int, size: int) -> int:
    count = int(like.device_mesh.size(mesh_dim))
    rows, place = -(-size // count), int(like.device_mesh.get_local_rank(mesh_dim))
    return max(0, min(rows, size - rows * place))


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - int(tensor.shape[0])
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor
