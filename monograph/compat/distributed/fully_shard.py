"""Modules that `fully_shard` has taken over: their parameters, how these are gathered, and the hooks that would do it.

What: the state that `torch.distributed.fsdp` keeps for a module. Why: it works by hooks that no trace can follow. Degraded
path: none, such a module is not known as one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from monograph.compat.distributed.groups import has_group
from monograph.compat.distributed.tensors import from_spec, local_of


@dataclass(frozen=True, eq=False)
class Inner:
    """What modules see of a parameter that was a DTensor already: one over the last dimensions of the mesh.

    `shape` is that of what this process has of it.
    """

    around: Callable[[torch.Tensor], Any]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def num_dims(self) -> int:
        """The dimensions of its mesh."""
        return len(self.placements)

    def local_gradient(self, gradient: Any) -> torch.Tensor:
        """What this process has of a gradient, laid out as the parameter."""
        if tuple(gradient.placements) != self.placements:
            gradient = gradient.redistribute(placements=self.placements)
        return local_of(gradient)


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter: the DTensor, the places where modules have it, and what they see there if that is a DTensor."""

    sharded: Any
    places: tuple[tuple[nn.Module, str], ...]
    inner: Inner | None = None
    group: Any = None  # that `fully_shard` gathers it with

    @property
    def waits(self) -> bool:
        """True if gradients of the next backward() are to be added to by later ones, before processes add theirs."""
        return self.group is not None and not self.group.reduce_grads

    @property
    def leaves_copies_apart(self) -> bool:
        """True if processes that have copies are not to add theirs."""
        return self.group is not None and self.group.reduce_grads and not self.group.all_reduce_grads


@dataclass(frozen=True, eq=False)
class ShardedModule:
    """A module whose parameters are whole while it runs. Types are None where nothing is cast."""

    module: nn.Module
    parameters: tuple[ShardedParameter, ...]
    parameter_type: torch.dtype | None = None
    gradient_type: torch.dtype | None = None
    output_type: torch.dtype | None = None
    casts_inputs: bool = False
    gathers_again: bool = False  # for backward
    hooks: tuple[int, ...] = ()  # the numbers of those before and after its forward
    shares: bool = False  # what is whole for it is whole for all that run inside of one call


def sharded_modules(modules: Iterator[nn.Module]) -> Iterator[ShardedModule]:
    """Those among modules that `fully_shard` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = None if fsdp is None else getattr(fsdp, "FSDPModule", None)
    for module in modules:
        if kind is not None and isinstance(module, kind):
            yield _described(module, module._get_fsdp_state())


def is_sharded_module(module: nn.Module) -> bool:
    """True for a module that `fully_shard` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = None if fsdp is None else getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def may_have_shards() -> bool:
    """True in a process in which `fully_shard` can have been called."""
    return "torch.distributed.fsdp" in sys.modules and has_group()


def put_back_shards(roots: Iterable[nn.Module]) -> None:
    """Let modules have their DTensors, if their last forward has left whole parameters there."""
    for module in (inner for root in roots for inner in root.modules()):
        if is_sharded_module(module):
            reshard: Any = module.reshard
            reshard()


def unknown_wishes(module: Any) -> str:
    """What a module was asked for that a step in a graph does not do; empty if there is nothing."""
    state = module._get_fsdp_state()
    for group in _groups(state):
        if getattr(group, "gradient_divide_factor", None) is not None:
            return "with a divisor of its own for gradients"
        if not (group.reduce_grads and group.all_reduce_grads):
            return "without synchronised gradients"
        if getattr(group, "_all_reduce_hook", None) is not None:
            return "with a hook on its sums"
        for item in group.fsdp_params:
            if item.offload_to_cpu:
                return "with parameters that are offloaded"
            if item.is_dtensor and _inner(item) is None:
                return "around DTensors over a mesh that has its own dimensions, too"
    return ""


# what a step reads of the groups that `fully_shard` makes, besides what never changes and what moves no number
READ_OF_GROUPS: Final = frozenset(
    ("reduce_grads", "all_reduce_grads", "gradient_divide_factor", "_all_reduce_hook")
)


def groups_of(module: Any) -> list[Any]:
    """The groups of parameters that a module gathers together, whose attributes say how."""
    return _groups(module._get_fsdp_state()) if is_sharded_module(module) else []


def _groups(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # before 2.13 there is one
        found = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(found)


def _described(module: nn.Module, state: Any) -> ShardedModule:
    policy = state._mp_policy
    groups = _groups(state)
    several = len(state._modules) > 1
    return ShardedModule(
        module,
        tuple(_parameter(item, group) for group in groups for item in group.fsdp_params),
        policy.param_dtype,
        policy.reduce_dtype,
        policy.output_dtype,
        bool(policy.cast_forward_inputs and policy.param_dtype),
        any(group.post_forward_mesh_info is not None for group in groups),
        tuple(_numbers(state._pre_forward_hook_handle, state._post_forward_hook_handle)),
        shares=several,
    )


def _numbers(*handles: Any) -> Iterator[int]:
    """The numbers of hooks; modules of one group have one handle of several."""
    for handle in handles:
        yield from (item.id for item in getattr(handle, "handles", (handle,)))


def _parameter(item: Any, group: Any) -> ShardedParameter:
    info = item._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return ShardedParameter(item.sharded_param, tuple(places), _inner(item), group)


def _inner(item: Any) -> Inner | None:
    """What: the layout that a parameter had before. Degraded path: None, and such a module is refused."""
    spec = getattr(item, "_unsharded_dtensor_spec", None) or getattr(item, "_tp_spec", None)
    if not item.is_dtensor or spec is None or spec.mesh.ndim >= item.sharded_param.device_mesh.ndim:
        return None
    return Inner(partial(from_spec, spec), tuple(spec.placements), tuple(item._orig_size))


@contextmanager
def without_hooks(module: nn.Module, numbers: tuple[int, ...]) -> Iterator[None]:
    """Inside, in the tables that this thread sees, the hooks of these numbers are not there."""
    tables: tuple[Any, ...] = (module._forward_pre_hooks, module._forward_hooks)
    before = [dict(table) for table in tables]
    for table in tables:
        for number in numbers:
            dict.pop(table, number, None)
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
