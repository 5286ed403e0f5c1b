"""Tensors that ranks share, by OneFlow's words: DTensors, whose rules and collectives are torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from monograph.compat.distributed.groups import has_group, shared_name, whole_group
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.fakes import is_fake
from monograph.distributed.placements import check_started, placement
from monograph.distributed.sbp import broadcast, partial_sum, sbp, split
from monograph.errors import DistributedError
from monograph.ir.call.tree import flatten, unflatten

_c10d: Any = torch.ops._c10d_functional
Signature = sbp | Sequence[sbp]
Shape = tuple[int, ...]


def to_global(
    item: Any,
    placement: placement | None = None,
    sbp: Signature | None = None,
    *,
    check_meta: bool = True,
) -> Any:
    """A tensor that the ranks of a placement share, or a module with such parameters and buffers, or containers of tensors.

    What each rank has becomes its part, its copy (that of the first rank counts) or its summand, as `sbp` says: one for each
    dimension of the placement. A tensor that is shared already is laid out anew. In a process without a group it is moved to
    the device. With `check_meta` ranks compare shapes and types first. Raises DistributedError on all ranks if those do
    not fit. A rank without a part may give None: it hears from the others what there is.
    """
    check_started()

    def convert(tensor: Any) -> Any:
        if not has_group():
            return tensor if placement is None else tensor.to(placement.type)
        if is_sharded(tensor):
            return _moved(tensor, placement, sbp)
        if placement is None or sbp is None:
            raise DistributedError(
                "to_global() of a tensor of this rank without a placement or without an sbp",
                hint='to_global(x, placement.all("cpu"), sbp.split(0))',
            )
        return _shared(tensor, placement, _placements(sbp, placement), check_meta=check_meta)

    if placement is not None and has_group():
        item = _heard(item, placement)
    return _converted(item, convert)


def to_local(item: Any) -> Any:
    """What this rank has of a tensor: its part, its copy or its summand. Of a module its parameters and buffers are that."""
    return _converted(item, lambda tensor: tensor.to_local() if is_sharded(tensor) else tensor)


def sbp_of(item: Any) -> tuple[sbp, ...]:
    """How the ranks share a tensor, for each dimension of its placement."""
    found = []
    for kind in item.placements:
        if kind.is_shard():
            found.append(split(kind.dim))
        else:
            found.append(partial_sum if kind.is_partial() else broadcast)
    return tuple(found)


def made_global(whole: torch.Tensor, placement: placement, sbp: Signature) -> Any:
    """The tensor of the first rank, shared as `sbp` says: factory functions make one on each rank."""
    mesh, kinds = placement.mesh, _placements(sbp, placement)
    if mesh.get_coordinate() is not None:
        for dim in range(mesh.ndim):
            whole = _of_first(whole, mesh.get_group(dim))
    copies = _copies(whole.detach(), placement)
    return _laid_out(copies, kinds).requires_grad_(whole.requires_grad)


def _placements(signature: Signature, on: placement) -> list[Placement]:
    items = [signature] if isinstance(signature, sbp) else [*signature]
    if len(items) != len(on.hierarchy):
        raise DistributedError(
            f"{len(items)} of {items} for {on}, which has {len(on.hierarchy)} dimensions",
            hint="give one sbp for each dimension",
        )
    kinds = {"broadcast": Replicate, "partial_sum": Partial}
    return [Shard(item.dim) if item.dim is not None else kinds[item.kind]() for item in items]


def _converted(item: Any, convert: Callable[[Any], Any]) -> Any:
    """A tensor, or nested containers of tensors, or the same module with what `convert` makes of each."""
    if isinstance(item, nn.Module):
        _convert_module(item, convert)
        return item
    leaves: list[Any] = []
    tree = flatten(item, leaves)
    made = [convert(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return unflatten(tree, iter(made))


def _convert_module(module: nn.Module, convert: Callable[[Any], Any]) -> None:
    known: dict[int, Any] = {}
    for owner in module.modules():
        parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *buffers):
            if id(tensor) not in known:
                made = convert(tensor.detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                known[id(tensor)] = (
                    nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made,
                    tensor,
                )
            setattr(owner, name, known[id(tensor)][0])


def _heard(item: Any, on: placement) -> Any:
    """Containers as the ranks of a placement have them, with empty tensors, in place of the None of another rank."""
    leaves: list[Any] = []
    tree = flatten(item, leaves)
    if isinstance(item, nn.Module) or any(map(is_fake, leaves)) or {*on} == {*range(dist.get_world_size())}:
        return item
    heard = [None]
    if dist.get_rank() == min(on):
        empty = [
            torch.empty(0, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        heard = [unflatten(tree, iter(empty))]
    dist.broadcast_object_list(heard, min(on))
    return heard[0] if item is None else item


def _shared(local: Any, on: placement, kinds: list[Placement], *, check_meta: bool) -> Any:
    mesh = on.mesh
    shape: torch.Size | None = None
    stride: Shape | None = None
    if check_meta and not is_fake(local):
        shape = torch.Size(_whole_shape(local, on, kinds))
        stride = torch.empty(shape, device="meta").stride()
    if mesh.get_coordinate() is not None:
        for dim, kind in enumerate(kinds):
            if kind.is_replicate():
                local = _of_first(local, mesh.get_group(dim))
    return DTensor.from_local(local, mesh, kinds, run_check=False, shape=shape, stride=stride)


class _OfFirst(torch.autograd.Function):
    """The tensor that the first rank of a group has. Each rank keeps the gradient of its copy."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        made: torch.Tensor = _c10d.wait_tensor(_c10d.broadcast(tensor.contiguous(), 0, group))
        return made

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _of_first(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    apply: Any = _OfFirst.apply
    made: torch.Tensor = apply(tensor, shared_name(group))
    return made


def _moved(item: Any, on: placement | None, signature: Signature | None) -> Any:
    """A tensor that is shared already, laid out in another way, and on other ranks if they differ."""
    here = placement.of(item.device_mesh)
    on = on or here
    kinds = [*item.placements] if signature is None else _placements(signature, on)
    if on == here:
        return _laid_out(item, kinds)
    if on.type != here.type:
        raise DistributedError(
            f"to_global() from {here} to {on}: devices of another type",
            hint="give both one type; x.to_local() is a plain tensor, which x.to(device) moves",
        )
    apply: Any = _Sent.apply
    whole = apply(item.full_tensor(), here, on, tuple(item.shape))
    return _laid_out(_copies(whole, on), kinds)


class _Sent(torch.autograd.Function):
    """A whole tensor that the ranks of one placement have, on all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, here: placement, there: placement, shape: Shape) -> Any:
        ctx.here, ctx.there = here, there
        if {*here} == {*there}:
            return whole.view_as(whole)
        if dist.get_rank() not in here:
            whole = whole.new_zeros(shape)
        return _c10d.wait_tensor(_c10d.broadcast(whole.contiguous(), min(here), shared_name(whole_group())))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if {*ctx.here} != {*ctx.there}:
            raise DistributedError(
                f"backward() from {ctx.there} to {ctx.here}: a gradient stays on the ranks where it is made",
                hint="set_stage() makes a pipeline of a graph, which sends gradients back",
            )
        return gradient, None, None, None


def _copies(whole: torch.Tensor, on: placement) -> Any:
    return DTensor.from_local(whole, on.mesh, [Replicate()] * on.mesh.ndim, run_check=False)


def _laid_out(item: Any, kinds: Sequence[Placement]) -> Any:
    """A shared tensor with other parts. Of summands that are asked for the first rank has the value, the others zeros."""
    mesh = item.device_mesh
    made = [
        dim
        for dim, (now, kind) in enumerate(zip(item.placements, kinds, strict=True))
        if kind.is_partial() and not now.is_partial()
    ]
    whole = [Replicate() if dim in made else kind for dim, kind in enumerate(kinds)]
    if whole != [*item.placements]:
        item = item.redistribute(placements=whole)
    if not made or mesh.get_coordinate() is None:
        return item
    gradients = [Partial() if dim in made else kind for dim, kind in enumerate(whole)]
    local = item.to_local(grad_placements=gradients)
    if any(mesh.get_local_rank(dim) for dim in made):
        local = local * 0
    return DTensor.from_local(local, mesh, kinds, run_check=False, shape=item.shape, stride=item.stride())


def _whole_shape(local: torch.Tensor, on: placement, kinds: Sequence[Placement]) -> Shape:
    """The shape of a tensor of which each rank has a part. Raises DistributedError on all ranks if parts do not fit."""
    mesh = on.mesh
    said: Any = (dist.get_rank(), str(local.dtype).removeprefix("torch."), tuple(local.shape))
    if mesh.get_coordinate() is not None:
        for dim in reversed(range(mesh.ndim)):
            all_said = [None] * mesh.size(dim)
            dist.all_gather_object(all_said, said, group=mesh.get_group(dim))
            said = all_said
    if len({*on}) < dist.get_world_size():  # the others hear of it
        heard = [said]
        dist.broadcast_object_list(heard, min(on))
        said = heard[0]
    return _joined(said, kinds)[2]


def _joined(said: Any, kinds: Sequence[Placement]) -> tuple[int, str, Shape]:
    """The first rank, the type and the shape of what those in `said` have together."""
    if not kinds:
        first: tuple[int, str, Shape] = said
        return first
    parts = [_joined(item, kinds[1:]) for item in said]
    rank, dtype, shape = parts[0]
    kind, dim = kinds[0], -1
    if isinstance(kind, Shard):
        dim = kind.dim
        if not -len(shape) <= dim < len(shape):
            raise DistributedError(
                f"split({dim}) of a tensor {dtype}{[*shape]}", hint="split along a dimension that there is"
            )
    for other, its_dtype, its_shape in parts:
        around = [*its_shape]
        if isinstance(kind, Shard) and len(its_shape) == len(shape):
            around[dim] = shape[dim]
        if (its_dtype, around) != (dtype, [*shape]):
            raise DistributedError(
                f"rank {other} has {its_dtype}{[*its_shape]} where rank {rank} has {dtype}{[*shape]}",
                hint="give each rank a tensor of one type and shape, but for the dimension that is split",
            )
    if not isinstance(kind, Shard):
        return rank, dtype, shape
    sizes = [part[2][dim] for part in parts]
    rows = -(-sum(sizes) // len(sizes))
    if sizes != (cut := [max(0, min(rows, sum(sizes) - rows * index)) for index in range(len(sizes))]):
        ranks = [part[0] for part in parts]
        raise DistributedError(
            f"the ranks {ranks} have {sizes} rows along dimension {dim}, where {cut} are the parts of {sum(sizes)}",
            hint="cut as torch.chunk() does: parts of one size, but for the last ones",
        )
    whole = [*shape]
    whole[dim] = sum(sizes)
    return rank, dtype, tuple(whole)
