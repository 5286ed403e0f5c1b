"""The modules of a graph of which each process of a group has a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from monograph.compat.distributed.groups import (
    group_size,
    import_fake_collectives,
    num_processes,
    shared_name,
    whole_group,
)
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.distributed.wrappers import (
    ignored_by,
    is_data_parallel,
    syncs_buffers,
    unknown_wishes,
)
from monograph.distributed.columns import group_of_copies, has_stages
from monograph.distributed.zero import parts_of_whole
from monograph.errors import DistributedError
from monograph.settings import DataParallel, Settings
from monograph.state.find import Owned

SYNCS_NEXT: Final = (
    "require_forward_param_sync"  # an attribute of wrappers, set by each forward for the next one
)
# what a step reads of wrappers, besides what never changes
READ_OF_WRAPPERS: Final = frozenset(
    ("broadcast_buffers", "forward_sync_buffers", SYNCS_NEXT, "require_backward_grad_sync")
)


@dataclass(frozen=True, eq=False)
class Replica:
    """A module that every process of a group trains, each on its part of the batch. `wrapper` is None for a plain one."""

    path: str
    module: nn.Module
    group: str
    size: int
    wrapper: DistributedDataParallel | None = None
    in_parts: frozenset[int] = (
        frozenset()
    )  # the ids of parameters of whose gradients each process gets its part

    @property
    def may_sync_buffers(self) -> bool:
        """True if there are buffers that a forward may take over from the first process."""
        has_buffers = self.size > 1 and next(self.buffers(), None) is not None
        return has_buffers and (self.wrapper is None or syncs_buffers(self.wrapper))

    @property
    def syncs_buffers(self) -> bool:
        """True if the next forward does so."""
        return self.may_sync_buffers and (self.wrapper is None or getattr(self.wrapper, SYNCS_NEXT))

    @property
    def wants_all(self) -> bool:
        """True if each parameter has to get a gradient."""
        wrapper = self.wrapper
        return wrapper is not None and not (wrapper.find_unused_parameters or wrapper.static_graph)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters whose gradients are averaged, by their paths in the graph."""
        for path, parameter in self._own(self.module.named_parameters()):
            if parameter.requires_grad and not is_sharded(parameter) and id(parameter) not in self.in_parts:
                yield path, parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that are those of the first process."""
        return (item for item in self._own(self.module.named_buffers()) if not is_sharded(item[1]))

    def _own(self, named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        ignored = set[str]() if self.wrapper is None else ignored_by(self.wrapper)
        prefix = self.path if self.wrapper is None else f"{self.path}.module"
        return ((f"{prefix}.{name}", tensor) for name, tensor in named if name not in ignored)


def replicas_of(owned: Owned, modules: Mapping[str, nn.Module], settings: Settings) -> tuple[Replica, ...]:
    """Those that are wrapped, and with `enable_data_parallel()` all modules of the graph that are not."""
    wrapped = {path: module for path, module in modules.items() if is_data_parallel(module)}
    whole = settings.data_parallel
    if whole is None and settings.zero is not None:
        whole = DataParallel()
    if not (wrapped or whole):
        return ()
    import_fake_collectives()
    found = [_of_wrapper(path, module) for path, module in wrapped.items()]
    if whole is not None:
        if num_processes() == 1 and whole.mesh is None:
            raise DistributedError(
                f"{'enable_zero' if settings.data_parallel is None else 'enable_data_parallel'}() in a single process",
                hint="start the script with torchrun, and call torch.distributed.init_process_group() before the first step",
            )
        if wrapped:
            raise DistributedError(
                f"enable_data_parallel() with {next(iter(wrapped))}, which DistributedDataParallel wraps",
                hint="use one of the two",
            )
        mesh = whole.mesh
        is_whole = mesh is None or (mesh.ndim > 1 and not has_stages(mesh))
        group = shared_name(whole_group() if is_whole else group_of_copies(mesh))
        size = group_size(group)
        parts = frozenset(parts_of_whole(owned, settings))
        found += [
            Replica(path, module, group, size, in_parts=parts) for path, module in owned.modules.items()
        ]
    return tuple(found)


def _of_wrapper(path: str, wrapper: Any) -> Replica:
    if wish := unknown_wishes(wrapper):
        raise DistributedError(
            f"{path} is wrapped by DistributedDataParallel with {wish}, which a graph does not have",
            hint="wrap it without: a graph has config.enable_amp() for mixed precision",
        )
    group = shared_name(wrapper.process_group)
    return Replica(path, wrapper.module, group, group_size(group), wrapper)
