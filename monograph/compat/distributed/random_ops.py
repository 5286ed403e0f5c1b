"""Random ops on DTensors of CPUs, for which torch draws in each process by itself: copies differ, and parts may be the same.

What: the table of ops that the dispatcher of DTensor hands to others. Degraded path: as torch does it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from monograph.compat.distributed.groups import shared_name
from monograph.compat.distributed.tensors import is_sharded, local_of

_aten: Any = torch.ops.aten
_c10d: Any = torch.ops._c10d_functional
_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_LIKE = (
    *(_aten.rand_like.default, _aten.randn_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)

_BY_ELEMENT = _aten.bernoulli.default  # whose argument says how likely each element is


@contextmanager
def drawn_together() -> Iterator[None]:
    """Inside, all processes of a mesh of CPUs have the draw of the first one, and each its part of that."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    dispatcher = None if module is None else getattr(module.DTensor, "_op_dispatcher", None)
    handlers: Any = getattr(dispatcher, "_custom_op_handlers", None)
    if not isinstance(handlers, dict):
        yield
        return

    def drawn(op: Any, args: Any, kwargs: Any) -> Any:
        if not is_sharded(args[0]) or args[0].device_mesh.device_type != "cpu":
            return _by_torch(handlers, op, args, kwargs)
        if op is _BY_ELEMENT:
            (likely,) = args
            return (torch.rand_like(likely, dtype=torch.float64) < likely).to(likely.dtype)
        return _drawn(op, *args, **kwargs)

    ours = dict.fromkeys((*_IN_PLACE, *_LIKE, _BY_ELEMENT), drawn)
    before = {op: handlers[op] for op in ours if op in handlers}
    handlers.update(ours)
    try:
        yield
    finally:
        for op in ours:
            del handlers[op]
        handlers.update(before)


def _by_torch(handlers: dict[Any, Callable[..., Any]], op: Any, args: Any, kwargs: Any) -> Any:
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


def _drawn(op: Any, like: Any, *args: Any, **kwargs: Any) -> Any:
    local, mesh = local_of(like), like.device_mesh
    whole = op(torch.empty(like.shape, dtype=local.dtype, device=local.device), *args, **kwargs)
    for mesh_dim in range(mesh.ndim):
        whole = _c10d.wait_tensor(_c10d.broadcast(whole, 0, shared_name(mesh.get_group(mesh_dim))))
    tensors = importlib.import_module("torch.distributed.tensor")
    everywhere = [tensors.Replicate()] * mesh.ndim
    spread = tensors.DTensor.from_local(whole, mesh, everywhere, run_check=False).redistribute(
        placements=[everywhere[0] if item.is_partial() else item for item in like.placements]
    )
    if op not in _IN_PLACE:
        return spread
    local.copy_(local_of(spread))
    return like
