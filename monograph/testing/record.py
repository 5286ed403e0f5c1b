"""What a step has left behind: results, changed arguments, gradients, parameters, buffers, optimizer and random state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from monograph._torch import storage_key
from monograph.ir.tree import Tree, flatten, leaf_paths
from monograph.testing.arguments import Arguments
from monograph.testing.step import Returned


@dataclass(frozen=True)
class Record:
    """All that can be seen after one call, by path. The tensors are the real ones, not copies."""

    forms: dict[str, Tree]  # of what is nested
    leaves: dict[str, Any]
    random_states: tuple[torch.Tensor, ...]  # of the CPU, and of each GPU in use

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor with its path."""
        return ((path, leaf) for path, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor))

    def results(self) -> Record:
        """Only what the call returned."""
        kept = {path: leaf for path, leaf in self.leaves.items() if path.startswith("result")}
        return Record({}, kept, self.random_states)


def record(
    returned: Returned,
    arguments: Arguments,
    module: nn.Module | None,
    optimizer: Optimizer | None,
    *,
    whole: bool,
) -> Record:
    """Look at everything that a call may have changed; `whole` is false if no gradient was taken."""
    forms: dict[str, Tree] = {}
    leaves: dict[str, Any] = {}

    def add(path: str, item: Any) -> None:
        found: list[Any] = []
        forms[path] = flatten(item, found)
        leaves.update(zip(leaf_paths(forms[path], path), found, strict=True))

    add("result", returned.result)
    for path, leaf in arguments.leaves():
        leaves[f"{path} afterwards"] = leaf
        if whole and isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            leaves[f"gradient of {path}"] = leaf.grad
    for index, clone in enumerate(returned.clones):
        leaves[f"argument {index} that takes a gradient, afterwards"] = clone
    for name, gradient in returned.parameter_gradients.items():
        leaves[f"gradient of {name}"] = gradient
    if module is not None:
        leaves.update((f"parameter {name}", value) for name, value in module.named_parameters())
        leaves.update((f"buffer {name}", value) for name, value in module.named_buffers())
    if optimizer is not None:
        add("optimizer state", list(optimizer.state.values()))
    return Record(forms, leaves, random_states())


def random_states() -> tuple[torch.Tensor, ...]:
    """The random numbers that come next."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return (torch.get_rng_state(), *devices)


def sharing(record: Record) -> dict[str, tuple[str, int, bool]]:
    """For each tensor the first path on the same memory, how far it begins from there, and if it is the same object."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    found = {}
    for path, tensor in record.tensors():
        strided = tensor.layout is torch.strided and tensor.numel() > 0
        owner, origin = first.setdefault(storage_key(tensor) if strided else id(tensor), (path, tensor))
        distance = int(tensor.storage_offset() - origin.storage_offset()) if strided else 0
        found[path] = (owner, distance, tensor is origin)
    return found
