"""What a step has made and changed, by path: results, parameters, buffers, optimizer state, gradients, random numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from monograph.capture.optimizers.trial_steps import first_state
from monograph.compat.distributed.tensors import awaited_part, is_sharded, layout_of, spec_of
from monograph.ir.call.nested import leaves_by_path
from monograph.ir.call.tree import flatten, leaf_paths
from monograph.ir.port import gradient_path
from monograph.state.find import (
    Owned,
    average_slots,
    module_slots,
    scaler_slots,
    tensor_paths,
)
from monograph.state.random import RandomState

RESULTS, PARAMETERS, OPTIMIZERS, OTHERS = (
    "results",
    "parameters and buffers",
    "optimizer state",
    "other state",
)
KINDS = (RESULTS, PARAMETERS, OPTIMIZERS, OTHERS)
After = Mapping[str, Mapping[str, Any]]  # kind → path → value


def after_step(owned: Owned, returned: Any, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Copies of everything. `given` are the leaves of the call by path. Of DTensors: what this process has, and the layout."""
    modules = owned.named_modules()
    names = tensor_paths(modules)
    tied = tied_paths(modules)
    state = {slot.path: slot.tensor for slot in module_slots(modules) if slot.path not in tied}
    others = {slot.path: slot.tensor for slot in scaler_slots(owned.scaler)}
    for average in owned.averages:
        others |= {slot.path: slot.tensor for slot in average_slots(average)}
    leaves: list[Any] = []
    tree = flatten(returned, leaves)
    results = dict(zip(leaf_paths(tree, "result"), leaves, strict=True))
    tensors = {path: item for path, item in (state | dict(given)).items() if isinstance(item, torch.Tensor)}
    gradients = {
        gradient_path(path): item.grad
        for path, item in tensors.items()
        if item.is_leaf and item.grad is not None
    }
    now = RandomState.now()
    generators = {"random/torch": now.cpu, "random/python": now.python, "random/numpy": now.numpy}
    found = {
        PARAMETERS: _copied(state),
        OPTIMIZERS: _copied(dict(_optimizer_state(owned, names))),
        OTHERS: _copied(others | tensors_given(given) | gradients | generators),
    }
    copied = _copied(results)
    found[OTHERS] |= {path: copied.pop(path) for path in copied.keys() - results.keys()}
    return {RESULTS: copied} | found


def tied_paths(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """For each further path of a tensor that has several the first, by which programs know it."""
    first: dict[int, str] = {}
    slots = ((slot.path, first.setdefault(id(slot.tensor), slot.path)) for slot in module_slots(modules))
    return {path: known for path, known in slots if path != known}


def first_entries(owned: Owned, paths: Collection[str], parts: Mapping[int, Any]) -> dict[str, Any]:
    """Of these paths of optimizer state those that an optimizer has not made yet, with the values they begin with.

    A graph has them from the first step on, and eager mode from the first step that is not skipped. `parts` has by id of a
    whole parameter what this process updates of it.
    """
    names = tensor_paths(owned.named_modules())
    found: dict[str, Any] = {}
    for registered in owned.optimizers if paths else ():
        for group in registered.optimizer.param_groups:
            for parameter in group["params"]:
                if not registered.optimizer.state.get(parameter):
                    path = f"{registered.name}/{names.get(id(parameter), '?')}"
                    if any(item.startswith(f"{path}/") for item in paths):
                        part = parts.get(id(parameter), parameter)
                        found |= dict(leaves_by_path(first_state(registered.optimizer, group, part), path))
    return {path: item for path, item in _copied(found).items() if path in paths}


def tensors_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are tensors."""
    return {path: item for path, item in given.items() if isinstance(item, torch.Tensor)}


def _optimizer_state(owned: Owned, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for registered in owned.optimizers:
        for owner, entries in registered.optimizer.state.items():
            name = names.get(id(owner), "?") if isinstance(owner, torch.Tensor) else str(owner)
            yield from leaves_by_path(entries, f"{registered.name}/{name}")
        for index, group in enumerate(registered.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{registered.name}/group{index}/{key}", value


def _copied(found: Mapping[str, Any]) -> dict[str, Any]:
    """Copies, of DTensors of what this process has, with their layouts."""
    copies = {
        path: _own(item).detach().clone() if isinstance(item, torch.Tensor) else item
        for path, item in found.items()
    }
    return copies | {
        f"layout of {path}": layout_of(spec_of(item)) for path, item in found.items() if is_sharded(item)
    }


def _own(item: Any) -> torch.Tensor:
    return awaited_part(item) if is_sharded(item) else item
