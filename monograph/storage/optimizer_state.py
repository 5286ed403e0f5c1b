"""The state of an optimizer in torch's own format, loaded into the tensors and param groups that are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from monograph.capture.first_state import FirstState
from monograph.capture.optimizer_facts import OF_SCHEDULERS
from monograph.capture.optimizers import first_state
from monograph.storage.graph_state import Loading, Part

State = Mapping[Any, Any]


def optimizer_part(optimizer: Optimizer, declared: FirstState) -> Part:
    """Param groups and state. Tensors that fit are changed in place, so that the builds which use them stay."""

    def load(value: Any, loading: Loading) -> None:
        if not isinstance(value, Mapping) or not {"state", "param_groups"} <= set(value):
            raise TypeError("expected the state dict of an optimizer, with 'state' and 'param_groups'")
        groups, state = _loaded(optimizer, dict(value))
        faults = list(_other_kind(optimizer, groups))
        if faults:
            raise ValueError("; ".join(faults))
        present = {
            **declared.of(optimizer),
            **{owner: item for owner, item in optimizer.state.items() if item},
        }
        faults = list(_other_shapes(optimizer, state, present))
        if faults:
            raise ValueError("; ".join(faults))
        merged = {owner: _merged(present.get(owner), entries, loading) for owner, entries in state.items()}
        new_groups = [
            {
                key: _merged(old.get(key), item, loading) if key != "params" else old[key]
                for key, item in new.items()
            }
            for old, new in zip(optimizer.param_groups, groups, strict=True)
        ]
        loading.commits.append(lambda: _install(optimizer, merged, new_groups))

    return Part(optimizer.state_dict, load)


def _loaded(optimizer: Optimizer, value: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """What torch's own `load_state_dict` would make of it; the optimizer is as before."""
    before = dict(optimizer.__dict__)
    optimizer.__dict__["param_groups"] = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(value)
        return optimizer.param_groups, dict(optimizer.state)
    finally:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)


def _other_kind(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[str]:
    """Signs that the state was saved by another kind of optimizer, whose numbers torch would take over unseen."""
    for index, (live, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        known = set(optimizer.defaults)
        given = set(saved) - {"params", "param_names", *OF_SCHEDULERS}
        if lost := known - given:
            yield f"param group {index} has no {', '.join(sorted(lost))}, as {type(optimizer).__name__} needs"
        if foreign := given - known - set(live):
            yield f"param group {index} has {', '.join(sorted(foreign))}, unknown to {type(optimizer).__name__}"


def _other_shapes(optimizer: Optimizer, state: State, present: State) -> Iterator[str]:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            entries = state.get(parameter)
            if not entries:
                continue
            known = present.get(parameter) or first_state(optimizer, group, parameter)
            for key, item in entries.items():
                expected = known.get(key)
                if not isinstance(item, torch.Tensor) or not isinstance(expected, torch.Tensor):
                    continue
                if item.shape != expected.shape:
                    where = f"parameter {position} in group {index}"
                    yield f"{key} of {where} is {tuple(item.shape)}; here it is {tuple(expected.shape)}"


def _merged(old: Any, new: Any, loading: Loading) -> Any:
    """`new` with the live objects of `old` where they can take the new values."""
    if isinstance(new, torch.Tensor):
        if isinstance(old, torch.Tensor) and _form(old) == _form(new):
            loading.copies.append((old, new))
            return old
        return new.clone()  # torch would let the optimizer train in the very tensors of the state dict
    if type(old) is type(new) is dict:
        return _Refill(old, {key: _merged(old.get(key), item, loading) for key, item in new.items()})
    if type(old) is type(new) is list and len(old) == len(new):
        items = [_merged(before, item, loading) for before, item in zip(old, new, strict=True)]
        return _Refill(old, items)
    if isinstance(new, dict):
        return {key: _merged(None, item, loading) for key, item in new.items()}
    return [_merged(None, item, loading) for item in new] if isinstance(new, list) else new


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class _Refill:
    """A live dict or list that gets new content when all is known to be right."""

    def __init__(self, live: Any, content: Any) -> None:
        self.live, self.content = live, content


def _settled(item: Any) -> Any:
    """The live object of a Refill, filled."""
    if not isinstance(item, _Refill):
        return item
    if isinstance(item.live, dict):
        content = {key: _settled(entry) for key, entry in item.content.items()}
        item.live.clear()
        item.live.update(content)
    else:
        item.live[:] = map(_settled, item.content)
    return item.live


def _install(optimizer: Optimizer, state: State, groups: list[dict[str, Any]]) -> None:
    for live, content in zip(optimizer.param_groups, groups, strict=True):
        settled = {key: _settled(item) for key, item in content.items()}
        live.clear()
        live.update(settled)
    settled_state = {owner: _settled(entries) for owner, entries in state.items()}
    optimizer.state.clear()
    optimizer.state.update(settled_state)
