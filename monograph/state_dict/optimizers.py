"""The state of an optimizer in torch's own format, loaded into the tensors and param groups that are there."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from monograph.capture.guards.optimizers import OF_SCHEDULERS
from monograph.capture.optimizers.first_state import FirstState
from monograph.compat.distributed.tensors import in_layout_of, is_sharded
from monograph.state.group_keys import CLIP_NORM, CLIP_TYPE, LR_SCALE
from monograph.state_dict.loading import Loading, Part, mapping
from monograph.state_dict.merge import is_torchs, merged, misfits, settled
from monograph.state_dict.parameters import fitting_state, raw_misfits

_OF_PARAMETERS = frozenset({"params", "param_names"})
_ASKED_FOR = frozenset({"initial_lr", CLIP_NORM, CLIP_TYPE, LR_SCALE})  # missed when they are not saved
_FLAGS = frozenset({"foreach", "fused"})  # None or a bool


@dataclass(frozen=True)
class _Loaded:
    """What torch's own `load_state_dict` makes of a state: param groups, state by owner, and other attributes."""

    groups: list[dict[str, Any]]
    state: dict[Any, Any]
    attributes: dict[str, Any]


def optimizer_part(name: str, optimizer: Optimizer, declared: FirstState) -> Part:
    """Param groups and state. Tensors that fit are changed in place, so that the builds which use them stay."""

    def load(value: Any, loading: Loading) -> None:
        given = _given(name, optimizer, value, loading)
        present = declared.of(optimizer) | {k: item for k, item in optimizer.state.items() if item}
        try:
            loaded = _loaded(optimizer, given, loading)
        except Exception:
            if not (faults := list(raw_misfits(name, optimizer, given["state"], present))):
                raise
            loading.wrong += faults  # these say more than what torch says
            return
        faults = [
            *_other_kind(optimizer, loaded.groups),
            *_other_groups(name, optimizer, loaded.groups, loading),
        ]
        if faults:
            loading.wrong += faults
            return
        state = fitting_state(name, optimizer, loaded.groups, loaded.state, given["state"], present, loading)
        new_state = {
            owner: merged(present.get(owner), _laid_out(owner, entries), loading)
            for owner, entries in state.items()
        }
        new_groups = [
            {key: old[key] if key == "params" else merged(old.get(key), new[key], loading) for key in new}
            for old, new in zip(optimizer.param_groups, loaded.groups, strict=True)
        ]
        loading.commits.append(lambda: _install(optimizer, new_state, new_groups, loaded.attributes))

    return Part(optimizer.state_dict, load)


def _laid_out(owner: Any, entries: Any) -> Any:
    """State of a parameter that is a DTensor, in the layout of that."""
    if not is_sharded(owner) or not isinstance(entries, dict):
        return entries
    return {
        key: in_layout_of(owner, item) if isinstance(item, torch.Tensor) and item.dim() else item
        for key, item in entries.items()
    }


def _given(name: str, optimizer: Optimizer, value: Any, loading: Loading) -> dict[str, Any]:
    """The state dict that is loaded, with the present parts for those that it lacks."""
    found = loading.known(name, optimizer.state_dict(), value)
    for key, entries in mapping(found["state"], "a dict as 'state'").items():
        mapping(entries, f"a dict as 'state' of parameter {key}")
    if not isinstance(found["param_groups"], (list, tuple)):
        raise TypeError(f"expected a list of param groups, got a {type(found['param_groups']).__name__}")
    for index, group in enumerate(found["param_groups"]):
        if not isinstance(mapping(group, f"a dict as param group {index}").get("params"), (list, tuple)):
            raise TypeError(f"param group {index} has no list of 'params'")
    return found


def _loaded(optimizer: Optimizer, given: dict[str, Any], loading: Loading) -> _Loaded:
    """Let torch load it; the optimizer is as before."""
    loading.before.add_object("optimizer", optimizer)
    before = dict(optimizer.__dict__)
    state = defaultdict(dict, {owner: dict(entries) for owner, entries in optimizer.state.items()})
    optimizer.__dict__["state"] = state
    optimizer.__dict__["param_groups"] = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(given)
        after = dict(optimizer.__dict__)
    finally:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)
    groups, state = after.pop("param_groups"), after.pop("state")
    attributes = {key: value for key, value in after.items() if before.get(key) is not value}
    return _Loaded(groups, dict(state), attributes)


def _other_kind(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[str]:
    """Signs that the state was saved by another kind of optimizer, whose numbers torch would take over unseen."""
    kind = type(optimizer).__name__
    for index, (live, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        known = set(optimizer.defaults)
        if lost := (known & set(live)) - set(saved):  # torch adds defaults that no group has
            yield f"param group {index} has no {', '.join(sorted(lost))}, as {kind} needs"
        # what a step of its own adds to a group is no sign
        foreign = (set(saved) - known - set(live) - OF_SCHEDULERS) & _hyperparameters_of_torch()
        if foreign:
            yield f"param group {index} has {', '.join(sorted(foreign))}, unknown to {kind}"


@cache
def _hyperparameters_of_torch() -> frozenset[str]:
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    names = [name for kind in kinds for name in inspect.signature(kind.__init__).parameters]
    return frozenset(names) - {"self", "params", "defaults"}


def _other_groups(
    name: str, optimizer: Optimizer, groups: list[dict[str, Any]], loading: Loading
) -> Iterator[str]:
    """What does not fit in param groups; keys that are unknown are dropped, constants of schedulers stay."""
    for index, (live, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        path = f"{name}/param_groups/{index}"
        # keys that the user or a scheduler put there stay if the state does not have them
        own = {key: item for key, item in live.items() if key not in saved and key not in optimizer.defaults}
        loading.missing += [f"{path}/{key}" for key in own if key in _ASKED_FOR]
        saved |= own
        if is_torchs(optimizer):  # another may count there
            others = saved.keys() - live.keys() - set(optimizer.defaults) - OF_SCHEDULERS - _OF_PARAMETERS
            loading.unexpected += [f"{path}/{key}" for key in sorted(others)]
            for key in others:
                del saved[key]
        for key in saved.keys() - _OF_PARAMETERS:
            known = live.get(key) if live.get(key) is not None else optimizer.defaults.get(key)
            known = False if known is None and key in _FLAGS else known
            yield from misfits(known, saved[key], f"{path}/{key}", exact=is_torchs(optimizer))


def _install(
    optimizer: Optimizer, state: Mapping[Any, Any], groups: list[dict[str, Any]], attributes: dict[str, Any]
) -> None:
    for live, content in zip(optimizer.param_groups, groups, strict=True):
        new = {key: settled(item) for key, item in content.items()}
        live.clear()
        live.update(new)
    new_state = {owner: settled(entries) for owner, entries in state.items()}
    optimizer.state.clear()
    optimizer.state.update(new_state)
    optimizer.__dict__.update(attributes)
