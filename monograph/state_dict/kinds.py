"""Kinds of parts: a module, a learning-rate scheduler, any object with a state of its own, a plain value."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monograph.capture.optimizers.first_state import FirstState
from monograph.compat.distributed.tensors import in_layout_of, is_sharded
from monograph.compat.modules import copy_versions, has_versions
from monograph.compat.optimizers import SCHEDULERS_INSIDE, schedulers_inside
from monograph.state.averages import Average
from monograph.state.find import module_slots
from monograph.state.random import SavedGenerators, SetGenerators
from monograph.state_dict.loading import Loading, Part, Stateful, mapping
from monograph.state_dict.merge import is_torchs, misfits
from monograph.state_dict.optimizers import optimizer_part
from monograph.state_dict.random import generators_of


def module_part(name: str, module: nn.Module) -> Part:
    """Parameters and buffers under torch's own keys."""

    def load(value: Any, loading: Loading) -> None:
        given, own = mapping(value), module.state_dict()
        _keep_module(module, loading)
        # if torch raises, for a shape, it does not say what is missing
        missing, unexpected = [k for k in own if k not in given], [k for k in given if k not in own]
        try:
            fitting = _laid_out(_with_versions(given, own), own)
            missing, unexpected = module.load_state_dict(fitting, strict=False)
        finally:
            loading.missing += [f"{name}.{key}" for key in missing]
            loading.unexpected += [f"{name}.{key}" for key in unexpected]

    return Part(module.state_dict, load)


def _laid_out(given: Any, own: Mapping[str, Any]) -> Any:
    """The state with DTensors laid out as those of the module, and whole tensors where it has such."""
    found = {
        key: in_layout_of(own[key], item)
        for key, item in given.items()
        if key in own and (is_sharded(own[key]) or is_sharded(item))
    }
    if not found:
        return given
    made: Any = OrderedDict({**given, **found})
    copy_versions(given, made)
    return made


def _with_versions(given: Mapping[str, Any], own: Any) -> Any:
    """The state with the versions of the modules: torch takes one without them for very old, and fills it up."""
    if has_versions(given) or not has_versions(own):
        return given
    versioned = type(own)(given)
    copy_versions(own, versioned)
    return versioned


def _keep_module(module: nn.Module, loading: Loading) -> None:
    """Remember all that loading may change: values, tables, attributes, extra state, and who is lazy."""
    for path, item in module.named_modules():
        loading.before.add_object(path, item)
        if type(item).get_extra_state is not nn.Module.get_extra_state:
            extra = copy.deepcopy(item.get_extra_state())
            loading.undo.append(partial(item.set_extra_state, extra))
    for slot in module_slots(dict(module.named_modules())):
        if is_lazy(slot.tensor):
            loading.undo.append(partial(_make_lazy, slot.tensor, type(slot.tensor)))
        else:
            loading.before.keep_values(slot.tensor)


def _make_lazy(tensor: Any, kind: type) -> None:
    """Take the shape away again that a lazy tensor got from a state."""
    if type(tensor) is not kind:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.__class__ = kind


# --- schedulers --------------------------------------------------------------------------------------------------------


def scheduler_part(name: str, scheduler: Any) -> Part:
    """A learning-rate scheduler, with those inside of it."""

    def load(value: Any, loading: Loading) -> None:
        fitting = _fitting(name, scheduler, mapping(value), loading)
        for item in _schedulers_in(scheduler):
            loading.before.add_object(name, item)
            for function in getattr(item, "lr_lambdas", ()):
                if hasattr(function, "__dict__"):
                    loading.before.add_object(name, function)
        scheduler.load_state_dict(copy.deepcopy(fitting))

    return Part(scheduler.state_dict, load)


def _fitting(path: str, scheduler: Any, given: Mapping[str, Any], loading: Loading) -> dict[str, Any]:
    """The state that is loaded: what is given and known, and the present value of what is not given."""
    own = scheduler.state_dict()
    others = [key for key in given if key not in own]
    loading.missing += [f"{path}/{key}" for key in own if key not in given]
    found = {key: given.get(key, own[key]) for key in own}
    if is_torchs(scheduler):
        loading.unexpected += [f"{path}/{key}" for key in others]
    else:  # one of the user's may make attributes in later steps
        found |= {key: given[key] for key in others}
    known = {key: own[key] for key in own if key != SCHEDULERS_INSIDE}
    loading.wrong += misfits(known, found, path, exact=is_torchs(scheduler))
    if SCHEDULERS_INSIDE in found:
        inside, states = getattr(scheduler, SCHEDULERS_INSIDE), found[SCHEDULERS_INSIDE]
        if not isinstance(states, (list, tuple)) or len(states) != len(inside):
            raise ValueError(f"expected the states of {len(inside)} schedulers inside")
        found[SCHEDULERS_INSIDE] = [
            _fitting(f"{path}/{SCHEDULERS_INSIDE}/{index}", item, mapping(state), loading)
            for index, (item, state) in enumerate(zip(inside, states, strict=True))
        ]
    return found


def _schedulers_in(scheduler: Any) -> list[Any]:
    inside = schedulers_inside(scheduler)
    return [scheduler, *(item for inner in inside for item in _schedulers_in(inner))]


# --- objects and values ------------------------------------------------------------------------------------------------


def object_part(name: str, item: Stateful) -> Part:
    """A registered object; modules, optimizers and schedulers are loaded with the checks that theirs have."""
    if isinstance(item, nn.Module):
        return module_part(name, item)
    if isinstance(item, Optimizer):
        return optimizer_part(name, item, FirstState())
    if isinstance(item, LRScheduler):
        return scheduler_part(name, item)

    def load(value: Any, loading: Loading) -> None:
        if is_torchs(item):  # a scaler
            value = _known(name, item.state_dict(), value, loading)
        _keep_object(name, item, loading)
        with suppress(
            AttributeError
        ):  # its first batch makes what it saves: there is no state yet to go back to
            loading.undo.append(partial(_load_now, item, copy.deepcopy(item.state_dict())))
        with SetGenerators(generators_of(name, item).values()) as noted:
            item.load_state_dict(copy.deepcopy(value))
        loading.set_by_objects |= noted.found
        item.state_dict()  # a loader of torch's makes its iterator now, and draws for that before the random state is set

    return Part(item.state_dict, load)


def _load_now(item: Stateful, value: Any) -> None:
    item.load_state_dict(value)
    item.state_dict()


def _keep_object(name: str, item: Any, loading: Loading) -> None:
    """Remember attributes, and the tensors and generators among them and among theirs."""
    owners = [item, *getattr(item, "__dict__", {}).values()]
    for owner in owners:
        if not hasattr(owner, "__dict__") or isinstance(owner, (type, torch.Tensor)):
            continue
        if owner is item:
            loading.before.add_object(name, owner)
        for value in vars(owner).values():
            if isinstance(value, torch.Generator):
                loading.undo.append(SavedGenerators([value]).restore)
            elif isinstance(value, torch.Tensor) and owner is item and not is_lazy(value):
                loading.before.keep_values(value)


def average_part(name: str, average: Average) -> Part:
    """A moving average of weights, in the format of torch's AveragedModel."""

    def load(value: Any, loading: Loading) -> None:
        updates, pairs = average.loaded(_known(name, average.state_dict(), value, loading))
        loading.copies += pairs
        loading.commits.append(partial(setattr, average, "updates", updates))

    return Part(average.state_dict, load)


def _known(name: str, own: Mapping[str, Any], value: Any, loading: Loading) -> dict[str, Any]:
    """The entries that are given and known, the present ones for those that are not given or do not fit."""
    found = loading.known(name, own, value)
    faults = {key: list(misfits(own[key], found[key], f"{name}/{key}")) for key in own}
    loading.wrong += [fault for items in faults.values() for fault in items]
    return {key: own[key] if faults[key] else found[key] for key in own}


def value_part(read: Callable[[], Any], write: Callable[[Any], object], kind: type) -> Part:
    """A plain value."""

    def load(value: Any, loading: Loading) -> None:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        loading.commits.append(lambda: write(value))

    return Part(read, load)
