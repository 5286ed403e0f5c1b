"""DTensors: tensors of which each process holds a part. Nothing is imported where nobody has made one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, Final

import torch


def is_sharded(item: object) -> bool:
    """True for a DTensor, of which this process holds a part."""
    module = sys.modules.get("torch.distributed.tensor")
    kind: Any = None if module is None else getattr(module, "DTensor", None)
    return kind is not None and issubclass(type(item), kind)


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
    return layout_of(item)(local, item.requires_grad if requires_grad is None else requires_grad)


def layout_of(item: Any, spec: Any = None) -> Callable[..., Any]:
    """What makes a DTensor of a part: laid out as another one, of which nothing is held, or as `spec` of torch says."""
    kind, spec = type(item), spec or item._spec

    def around(local: torch.Tensor, requires_grad: bool = False) -> Any:
        with torch.no_grad():
            return kind(local, spec, requires_grad=requires_grad)

    return around


def split_dim(placement: Any) -> int | None:
    """The dimension of which processes have rows each; None where each has all.

    What: `_StridedShard`, which says the same of rows that other processes have in parts again. Degraded path: none needed.
    """
    found: int | None = getattr(placement, "dim", None)
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


def laid_out_alike(live: Any, loaded: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What this process has of a tensor of state, and of one that is to be copied into it, laid out in the same way."""
    if not is_sharded(live):
        return live, loaded.full_tensor() if is_sharded(loaded) else loaded
    if not is_sharded(loaded):
        tensors = importlib.import_module("torch.distributed.tensor")
        everywhere = [tensors.Replicate()] * live.device_mesh.ndim
        loaded = tensors.DTensor.from_local(loaded, live.device_mesh, everywhere, run_check=False)
    if (loaded.device_mesh, loaded.placements) != (live.device_mesh, live.placements):
        loaded = loaded.redistribute(live.device_mesh, live.placements)
    return local_of(live), local_of(loaded)


def _itself(item: Any) -> Any:
    return item


# what finds the layout of what an op gives, and its form
_PROPAGATIONS: Final = ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached")


@contextmanager
def forms_without_symbols(plain: Callable[[Any], Any] = _itself) -> Iterator[None]:
    """Inside, numbers that move are what `plain` makes of them where DTensor works out the form of what an op gives.

    What: the methods that do so, and the caches of what was found. Why: they run the op for that and look numbers up, which would
    make constants of the build of them; and a symbol of one trace means nothing in another. Degraded path: more builds, and errors.
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

    debug = importlib.import_module("torch.distributed.tensor.debug")
    forget: Callable[[], Any] = getattr(debug, "_clear_sharding_prop_cache", _nothing)
    for name in names:
        setattr(propagator, name, partial(without, getattr(propagator, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(propagator, name)
        forget()


def _plain(plain: Callable[[Any], Any], item: Any) -> Any:
    return type(item)([_plain(plain, each) for each in item]) if type(item) in (list, tuple) else plain(item)


def _nothing() -> None:
    pass
