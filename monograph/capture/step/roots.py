"""Where the search for what a step can reach begins, and the classes whose attributes are watched."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import root_class
from monograph.capture.step.request import Request
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.autograd import called_by_torch
from monograph.compat.distributed.fully_shard import READ_OF_GROUPS, groups_of
from monograph.distributed.replicas import READ_OF_WRAPPERS, SYNCS_NEXT, Replica
from monograph.ir.call.tree import kinds_in
from monograph.state.find import Owned


def roots_of(request: Request, modules: Mapping[str, nn.Module], inputs: Inputs) -> Iterator[tuple[str, Any]]:
    """The objects that the step begins with, by their labels."""
    owned = request.owned
    yield from modules.items()
    yield from ((registered.name, registered.optimizer) for registered in owned.optimizers)
    wrapped = (registered for registered in owned.optimizers if registered.wrapper is not None)
    yield from ((f"{registered.name} wrapper", registered.wrapper) for registered in wrapped)
    yield from ((average.path, average.decay) for average in owned.averages)
    yield from (("graph", owned.owner), ("build", request.build))
    classes = dict.fromkeys(kinds_in(request.call.tree))
    yield from ((kind.__qualname__, kind) for kind in classes if kind.__module__ != "builtins")
    yield from ((type(leaf).__qualname__, leaf) for leaf in request.call.leaves if isinstance(leaf, Enum))
    leaves = [*request.call.leaves, *(item.owner for item in inputs.items)]
    yield from (("a hook", hook) for hook in called_by_torch(leaves))


def note_wrappers(reach: Reach, modules: Mapping[str, nn.Module], replicas: Collection[Replica]) -> None:
    """Attributes of wrappers, and of what `fully_shard` keeps, are read by code in place of theirs."""
    takes_over = any(item.may_sync_buffers for item in replicas)
    reach.may_read(READ_OF_WRAPPERS if takes_over else READ_OF_WRAPPERS - {SYNCS_NEXT} if replicas else ())
    for path, module in modules.items():
        for group in groups_of(module):
            reach.may_read_of(group, f"fully_shard of {path}", READ_OF_GROUPS)


def watched_classes(owned: Owned) -> Iterator[type]:
    """The classes of what the graph holds, each right under object: subclasses are reached through it."""
    yield from (nn.Module, torch.optim.Optimizer, root_class(owned.owner))
    if owned.scaler is not None:
        yield root_class(owned.scaler)
