"""The loaded state of each parameter of an optimizer, held against what the optimizer has or would make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from monograph.capture.optimizers.trial_steps import first_state
from monograph.state_dict.loading import Loading
from monograph.state_dict.merge import is_torchs, misfits

State = Mapping[Any, Mapping[str, Any]]


@dataclass(frozen=True)
class _Loaded:
    """The state of one parameter: its path and param group, what is loaded, and what was in the file."""

    path: str
    parameter: torch.Tensor
    group: dict[str, Any]
    entries: dict[str, Any]
    saved: Any

    def with_own_dtypes(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """The entries, without torch's cast to the dtype of the parameter where the optimizer keeps another."""

        def own(key: str, cast: Any) -> Any:
            raw = self.saved.get(key) if isinstance(self.saved, Mapping) else None
            if not isinstance(raw, torch.Tensor) or not isinstance(cast, torch.Tensor):
                return cast
            expected = known.get(key)
            is_own = isinstance(expected, torch.Tensor) and expected.dtype == raw.dtype
            return raw.to(cast.device) if is_own and raw.shape == cast.shape else cast

        return {key: own(key, cast) for key, cast in self.entries.items()}


@dataclass
class _FirstStates:
    """What the first step would make, found once for parameters of one form: that takes trial steps."""

    optimizer: Optimizer
    known: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def of(self, item: _Loaded) -> dict[str, Any]:
        """Empty if that is not known. Only keys, kinds and shapes are those of this parameter."""
        if is_lazy(item.parameter):
            return {}
        form = id(item.group), item.parameter.shape, item.parameter.dtype, item.parameter.device
        if form not in self.known:
            self.known[form] = first_state(self.optimizer, item.group, item.parameter)
        return self.known[form]


def fitting_state(
    name: str,
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    loaded: State,
    saved: Mapping[Any, Any],
    present: State,
    loading: Loading,
) -> dict[Any, Any]:
    """The loaded state by owner, with what is missing and wrong in it noted; what is unexpected is left out."""
    first_states, exact = _FirstStates(optimizer), is_torchs(optimizer)
    unknown = [owner for owner in loaded if _is_unknown(owner, optimizer)]
    loading.unexpected += [f"{name}/state/{owner}" for owner in unknown]
    found: dict[Any, Any] = {
        owner: item for owner, item in loaded.items() if not _is_unknown(owner, optimizer)
    }
    for item in _parameters(name, optimizer, groups, loaded, saved):
        own = present.get(item.parameter)
        known = first_states.of(item) if own is None else own
        entries = item.with_own_dtypes(known)
        loading.wrong += misfits(known, entries, item.path, exact=exact)
        same = own is not None and own.keys() == entries.keys()
        if not same and (entries or (own is not None and exact)):
            entries = _completed(item, entries, first_states, own, loading)
        found[item.parameter] = entries
    return found


def raw_misfits(name: str, optimizer: Optimizer, saved: Mapping[Any, Any], present: State) -> Iterator[str]:
    """What is wrong in a state that torch did not load, by the entries that are there."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if index in saved and parameter in present:
            path = f"{name}/state/{index}"
            yield from misfits(present[parameter], saved[index], path, exact=is_torchs(optimizer))


def _is_unknown(owner: Any, optimizer: Optimizer) -> bool:
    """True for the number of no parameter; torch's own optimizers have state of parameters only."""
    if isinstance(owner, torch.Tensor) or owner in optimizer.state:
        return False
    return isinstance(owner, int) or is_torchs(optimizer)


def _parameters(
    name: str, optimizer: Optimizer, groups: list[dict[str, Any]], loaded: State, saved: Mapping[Any, Any]
) -> Iterator[_Loaded]:
    index = 0
    for live, group in zip(optimizer.param_groups, groups, strict=True):
        for parameter in live["params"]:
            if parameter in loaded:
                entries, path = dict(loaded[parameter]), f"{name}/state/{index}"
                yield _Loaded(path, parameter, group, entries, saved.get(index))
            index += 1


def _completed(
    item: _Loaded,
    entries: dict[str, Any],
    first_states: _FirstStates,
    own: Mapping[str, Any] | None,
    loading: Loading,
) -> dict[str, Any]:
    """The entries with the present or the first value of those that are missing, and without unknown ones."""
    first = first_states.of(item)
    if not first:
        return entries
    lost = [key for key in first if key not in entries]
    loading.missing += [f"{item.path}/{key}" for key in lost]
    if lost:
        values = {**first_state(first_states.optimizer, item.group, item.parameter), **(own or {})}
        entries = {**{key: values[key] for key in lost}, **entries}
    if is_torchs(first_states.optimizer):  # another may make entries in later steps
        others = [key for key in entries if key not in first and key not in (own or {})]
        loading.unexpected += [f"{item.path}/{key}" for key in others]
        entries = {key: value for key, value in entries.items() if key not in others}
    return entries
