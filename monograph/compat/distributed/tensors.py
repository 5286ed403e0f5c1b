"""DTensors: tensors of which each process holds a part. Nothing is imported where nobody has made one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist


def is_sharded(item: object) -> bool:
    """True for a DTensor, of which this process holds a part."""
    return is_sharded_type(type(item))


def is_sharded_type(kind: type) -> bool:
    """True for the class of DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    found: Any = None if module is None else getattr(module, "DTensor", None)
    return found is not None and issubclass(kind, found)


def local_of(item: Any) -> torch.Tensor:
    """The part of a DTensor that this process holds, the same object each time.

    What: the field that holds it. Why: it is an input of programs, by which object it is. Degraded path: none.
    """
    found: torch.Tensor = item._local_tensor
    return found


def part_of(item: Any) -> Any:
    """Of a DTensor the part that this process holds, anything else as it is."""
    return local_of(item) if is_sharded(item) else item


def with_local(item: Any, local: torch.Tensor, *, requires_grad: bool | None = None) -> Any:
    """A DTensor laid out as another one, with another part.

    What: the constructor. Why: what is public runs checks that communicate. Degraded path: none.
    """
    wanted = item.requires_grad if requires_grad is None else requires_grad
    with torch.no_grad():
        return type(item)(local, item._spec, requires_grad=wanted)


def split_dim(placement: Any) -> int | None:
    """The dimension of which processes have rows each; None where each has all.

    What: `_StridedShard`, which says the same of rows that other processes have in parts again. Degraded path: none needed.
    """
    found: int | None = getattr(placement, "dim", None)
    return found


def spec_of(item: Any) -> Any:
    """What a DTensor is besides its part: mesh, placements, whole shape. What: a field. Degraded path: none."""
    return item._spec


def layout_of(spec: Any) -> str:
    """The same in words."""
    names = spec.mesh.mesh_dim_names
    mesh = tuple(spec.mesh.shape) if names is None else dict(zip(names, spec.mesh.shape, strict=True))
    return f"{tuple(spec.shape)} {', '.join(map(str, spec.placements))} on a mesh {mesh} of {spec.mesh.device_type}"


def from_spec(spec: Any, local: torch.Tensor) -> Any:
    """The DTensor of a part; autograd goes through if it goes through the part."""
    kind = importlib.import_module("torch.distributed.tensor").DTensor
    if local.requires_grad and torch.is_grad_enabled():
        return kind.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    return kind(local, spec, requires_grad=False)


def with_shape(spec: Any, shape: tuple[int, ...]) -> Any:
    """The same layout of a tensor of another whole shape. What: torch's record of it. Degraded path: none."""
    meta = spec.tensor_meta
    stride = meta.stride if len(meta.stride) == len(shape) else (1,)
    return replace(spec, tensor_meta=meta._replace(shape=torch.Size(shape), stride=stride))


def awaited_part(item: Any) -> torch.Tensor:
    """The part of a DTensor, when it is there: what collectives have begun may be waited for.

    What: the class of a tensor that is on its way, and the field that holds it. Degraded path: none.
    """
    found = local_of(item)
    if type(found).__name__ == "AsyncCollectiveTensor":
        found = found.wait()  # type: ignore[attr-defined]
        put_local(item, found)
    return found


def rows_here(rows: int, mesh: Any) -> tuple[int, int]:
    """The first of so many rows that this process has along the last dimension of a mesh, and the first that it has not."""
    last = mesh.ndim - 1
    share = -(-rows // mesh.size(last))
    begin = min(rows, share * mesh.get_local_rank(last))
    return begin, min(rows, begin + share)


def put_local(item: Any, local: torch.Tensor) -> None:
    """Let a DTensor have another part. What: the field that holds it. Degraded path: none."""
    item._local_tensor = local


def part_laid_out(whole: torch.Tensor, mesh: Any, *, is_split: bool) -> Any:
    """A DTensor over a mesh, of a tensor that all its processes have: a view of that.

    With `is_split` the processes along its last dimension have some of the rows each, else all have all. None asks another one.
    """
    tensors = importlib.import_module("torch.distributed.tensor")
    placements = [tensors.Replicate()] * mesh.ndim
    placements[-1] = tensors.Shard(0) if is_split else tensors.Replicate()
    local = whole
    if is_split:
        begin, end = rows_here(whole.shape[0], mesh)
        local = whole[begin:end]
    shape, stride = (
        whole.shape,
        torch.empty_like(whole, device="meta", memory_format=torch.contiguous_format).stride(),
    )
    return tensors.DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def is_copied(item: object) -> bool:
    """True for a DTensor of which some processes have copies."""
    return is_sharded(item) and any(map(_is_copied, item.device_mesh.shape, item.placements))  # type: ignore[attr-defined]


def with_rows_apart(item: Any) -> Any:
    """A DTensor of which processes have copies, with some of its rows on each of them instead."""
    tensors = importlib.import_module("torch.distributed.tensor")
    placements = [*item.placements]
    placements[[*map(_is_copied, item.device_mesh.shape, placements)].index(True)] = tensors.Shard(0)
    with torch.no_grad():
        made = item.detach().redistribute(placements=placements)
        awaited_part(made)
        return made.clone(memory_format=torch.contiguous_format)


def _is_copied(size: int, placement: Any) -> bool:
    return size > 1 and bool(placement.is_replicate())


def whole_here(item: Any) -> torch.Tensor:
    """All of a DTensor, by its own rules, without history. All processes of its mesh call it."""
    whole: torch.Tensor = item.detach().full_tensor()
    return whole


def mean_as(gradient: torch.Tensor, like: Any) -> Any:
    """The mean of what all processes of a mesh have, laid out as the DTensor `like`: by DTensor's own rules."""
    tensors, mesh = importlib.import_module("torch.distributed.tensor"), like.device_mesh
    shares = tensors.DTensor.from_local(gradient, mesh, [tensors.Partial()] * mesh.ndim, run_check=False)
    mean = shares.redistribute(placements=like.placements) / mesh.size()
    awaited_part(mean)
    return mean


def laid_out_as(item: Any, other: Any) -> Any:
    """A DTensor laid out as another one, by its own rules; what is not sharded as it is."""
    if not (is_sharded(item) and is_sharded(other)) or item.placements == other.placements or not item.dim():
        return item
    return item.redistribute(other.device_mesh, other.placements)


def whole_on_all(item: Any) -> torch.Tensor:
    """All of a DTensor, in every process, also in those that have no part of it. All call it."""
    whole: torch.Tensor = item.detach().full_tensor()
    ranks = item.device_mesh.mesh.flatten().tolist()
    if len(ranks) < dist.get_world_size():
        whole = whole if dist.get_rank() in ranks else whole.new_empty(item.shape)
        dist.broadcast(whole, min(ranks))
    return whole


def in_layout_of(live: Any, loaded: Any) -> Any:
    """What was loaded, laid out as what is there; as it is if the shapes differ."""
    if not isinstance(loaded, torch.Tensor) or loaded.shape != live.shape:
        return loaded
    local = laid_out_alike(live, loaded)[1]
    return with_local(live, local, requires_grad=False) if is_sharded(live) else local


def laid_out_alike(live: Any, loaded: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What this process has of a tensor of state, and of one that is to be copied into it, laid out in the same way."""
    if is_sharded(loaded) and not (is_sharded(live) and loaded.device_mesh == live.device_mesh):
        loaded = whole_on_all(loaded)
    if not is_sharded(live):
        return live, loaded
    if not is_sharded(loaded):
        tensors = importlib.import_module("torch.distributed.tensor")
        everywhere = [tensors.Replicate()] * live.device_mesh.ndim
        loaded = tensors.DTensor.from_local(loaded, live.device_mesh, everywhere, run_check=False)
    if loaded.placements != live.placements:
        loaded = loaded.redistribute(live.device_mesh, live.placements)
    return local_of(live), local_of(loaded)


def _itself(item: Any) -> Any:
    return item


# what finds the layout of what an op gives, and its form
_PROPAGATIONS: Final = ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached")


@contextmanager
def forms_without_symbols(plain: Callable[[Any], Any] = _itself) -> Iterator[None]:
    """Inside, numbers that move are what `plain` makes of them where DTensor works out the form of what an op gives.

    What: the methods that do so, the caches of what was found, and the hash by which they know an op. Why: they run the op for
    that and look numbers up, which would make constants of the build of them, as the hash would, without which nothing is cached;
    and a symbol of one trace means nothing in another. Degraded path: more builds, and errors.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    dispatcher = None if module is None else getattr(module.DTensor, "_op_dispatcher", None)
    propagator: Any = getattr(dispatcher, "sharding_propagator", None)
    names = [name for name in _PROPAGATIONS if hasattr(propagator, name)]
    if not names:
        yield
        return

    def without(its_own: Any, schema: Any) -> Any:
        other = copy(schema)
        other.args_schema = _plain(plain, schema.args_schema)
        other.kwargs_schema = {key: _plain(plain, item) for key, item in schema.kwargs_schema.items()}
        getattr(other, "_recompute_comparison_key", _nothing)()
        return its_own(other)

    schemas: Any = getattr(sys.modules.get("torch.distributed.tensor._op_schema"), "OpSchema", _Unknown)
    its_hash = schemas.__hash__

    def hash_without(schema: Any) -> int:
        for item in (*schema.args_schema, *schema.kwargs_schema.values()):
            for entry in item if isinstance(item, (list, tuple)) else (item,):
                if plain(entry) is not entry:
                    raise TypeError("a number that moves has no hash")
        return int(its_hash(schema))

    debug = importlib.import_module("torch.distributed.tensor.debug")
    forget: Callable[[], Any] = getattr(debug, "_clear_sharding_prop_cache", _nothing)
    for name in names:
        setattr(propagator, name, partial(without, getattr(propagator, name)))
    schemas.__hash__ = hash_without
    try:
        yield
    finally:
        for name in names:
            delattr(propagator, name)
        schemas.__hash__ = its_hash
        forget()


def _plain(plain: Callable[[Any], Any], item: Any) -> Any:
    return type(item)([_plain(plain, each) for each in item]) if type(item) in (list, tuple) else plain(item)


def _nothing() -> None:
    pass


class _Unknown:
    """In place of what this version of torch does not have."""
