"""What the state of a graph consists of, each part under its key.

Modules stand under the names of their attributes. All other keys have a dot, so that no module can have one.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from monograph.capture.averages import Average
from monograph.capture.first_state import FirstState
from monograph.capture.state import Holdings, Slot, module_slots, parameter_paths
from monograph.compiler import Build
from monograph.config import Settings
from monograph.ir.port import FREE
from monograph.ir.state import StateStore
from monograph.storage.graph_state import (
    Loading,
    Part,
    Stateful,
    module_part,
    object_part,
    scheduler_part,
    value_part,
)
from monograph.storage.optimizer_state import optimizer_part

ABOUT = "graph.about"


@dataclass(frozen=True)
class Contents:
    """What a graph holds that has state."""

    name: str  # of the class
    settings: Settings
    holdings: Holdings
    store: StateStore
    declared: FirstState
    builds: Sequence[Build]
    registered: Mapping[str, Stateful]
    known_tensors: set[str] = field(
        default_factory=set
    )  # paths of loaded tensors outside of module state dicts
    python_random: bool = False


def graph_parts(contents: Contents) -> dict[str, Part]:
    """The parts in the order in which they are loaded: the random state comes behind what may draw from it."""
    holdings, store = contents.holdings, contents.store
    parts = {name: module_part(name, module) for name, module in holdings.modules.items()}
    for index, held in enumerate(holdings.optimizers):
        parts[held.name] = optimizer_part(held.optimizer, contents.declared)
        if held.scheduler is not None:
            parts[f"scheduler.{index}"] = scheduler_part(f"scheduler.{index}", held.scheduler)
    if holdings.scaler is not None:
        parts["graph.scaler"] = object_part(holdings.scaler)
    parts |= {f"ema.{average.path}": _average_part(average) for average in holdings.averages}
    parts |= {f"state.{name}": object_part(item) for name, item in contents.registered.items()}
    parts["graph.tensors"] = _tensors_part(contents)
    parts["graph.gradients"] = _gradients_part(contents)
    parts["graph.steps"] = value_part(lambda: store.steps, lambda value: setattr(store, "steps", value), int)
    parts["graph.rng"] = _random_part(contents)
    parts[ABOUT] = _about_part(contents)
    return parts


def _average_part(average: Average) -> Part:
    """Averaged weights, in the format of `torch.optim.swa_utils.AveragedModel`."""

    def load(value: Any, loading: Loading) -> None:
        updates, pairs = average.loaded(value)
        loading.copies += pairs
        loading.commits.append(partial(setattr, average, "updates", updates))

    return Part(average.state_dict, load)


# --- tensors that no state dict of a module has ----------------------------------------------------------------------


def _tensors_part(contents: Contents) -> Part:
    """Attributes that are tensors, and buffers that are not persistent, if a step changes them."""
    slots = {slot.path: slot for slot in module_slots(contents.holdings.named_modules())}

    def read() -> dict[str, torch.Tensor] | None:
        paths = _changed_outside(contents, slots)
        return {path: slots[path].tensor.detach() for path in paths if path in slots} or None

    def load(value: Any, loading: Loading) -> None:
        modules = contents.holdings.named_modules()
        for path, tensor in value.items():
            owner, _, name = path.rpartition(".")
            if path in slots and _fits(slots[path].tensor, tensor):
                loading.copies.append((slots[path].tensor, tensor))
            elif owner in modules:
                module = modules[owner]
                table = module._buffers if name in module._buffers else module.__dict__
                loading.commits.append(partial(table.__setitem__, name, tensor.clone()))
            else:
                loading.unexpected.append(path)
                continue
            loading.commits.append(partial(contents.known_tensors.add, path))

    return Part(read, load, optional=True)


def _changed_outside(contents: Contents, slots: Mapping[str, Slot]) -> list[str]:
    """The paths of module tensors that steps change and that `module.state_dict()` leaves out."""
    saved = {
        id(tensor)
        for module in contents.holdings.modules.values()
        for tensor in module.state_dict(keep_vars=True).values()
    }
    changed = dict.fromkeys(sorted(contents.known_tensors))
    for build in contents.builds:
        changed |= dict.fromkeys(port.path for _, port in build.program.updates())
    lost = [path for path in changed if path.startswith(FREE)]
    if lost:
        warnings.warn(
            f"a step of {contents.name} changes a tensor that belongs to no module ({', '.join(lost)}): "
            "it is not part of the state; hold it in a buffer",
            stacklevel=5,
        )
    return [path for path in changed if path in slots and id(slots[path].tensor) not in saved]


def _fits(live: torch.Tensor, saved: Any) -> bool:
    return isinstance(saved, torch.Tensor) and (live.shape, live.dtype) == (saved.shape, saved.dtype)


def _gradients_part(contents: Contents) -> Part:
    """Gradients that stay from one step to the next."""

    def named() -> dict[str, torch.Tensor]:
        modules = contents.holdings.named_modules()
        parameters = {id(p): p for module in modules.values() for p in module.parameters(recurse=False)}
        paths = parameter_paths(modules)
        return {paths[key]: parameter for key, parameter in parameters.items()}

    def read() -> dict[str, torch.Tensor] | None:
        if not contents.settings.keep_gradients:
            return None
        found = {path: p.grad.detach() for path, p in named().items() if p.grad is not None}
        return found or None

    def load(value: Any, loading: Loading) -> None:
        parameters = named()
        loading.unexpected += [f"gradient of {path}" for path in value if path not in parameters]
        for path, parameter in parameters.items():
            gradient = value.get(path)
            if gradient is not None and parameter.shape != gradient.shape:
                raise ValueError(f"{path} is {tuple(parameter.shape)}, its gradient {tuple(gradient.shape)}")
            loading.commits.append(partial(_set_gradient, parameter, gradient))

    return Part(read, load, optional=True)


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)


# --- random numbers --------------------------------------------------------------------------------------------------


def _random_part(contents: Contents) -> Part:
    """The states of torch's generators, of those that the graph and its modules hold, and of Python's if asked."""

    def read() -> dict[str, Any]:
        found: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state_all()
        if generators := _generators(contents.holdings):
            found["generators"] = {path: item.get_state() for path, item in generators.items()}
        if contents.python_random:
            found["python"] = random.getstate()
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                found["numpy"] = numpy.random.get_state(legacy=True)
        return found

    def load(value: Any, loading: Loading) -> None:
        generators, saved = _generators(contents.holdings), value.get("generators", {})
        loading.missing += [f"generator {path}" for path in generators if path not in saved]
        loading.unexpected += [f"generator {path}" for path in saved if path not in generators]
        _check_states(value)
        loading.commits.append(lambda: _set_random(value, generators))

    return Part(read, load)


def _generators(holdings: Holdings) -> dict[str, torch.Generator]:
    places = {"": holdings.owner, **holdings.named_modules()}
    return {
        f"{path}.{name}".lstrip("."): item
        for path, owner in places.items()
        for name, item in vars(owner).items()
        if isinstance(item, torch.Generator)
    }


def _check_states(value: Mapping[str, Any]) -> None:
    """Try the states out on generators of their own: an unfit one raises here."""
    torch.Generator().set_state(value["cpu"])
    for state in value.get("generators", {}).values():
        if len(state) == len(value["cpu"]):
            torch.Generator().set_state(state)
    if "python" in value:
        random.Random().setstate(value["python"])
    if "numpy" in value and "numpy" in sys.modules:
        sys.modules["numpy"].random.RandomState().set_state(value["numpy"])


def _set_random(value: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    torch.set_rng_state(value["cpu"])
    if "cuda" in value and torch.cuda.is_available():
        for index, state in enumerate(value["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
    for path, state in value.get("generators", {}).items():
        if path in generators:
            generators[path].set_state(state)
    if "python" in value:
        random.setstate(value["python"])
    if "numpy" in value and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(value["numpy"])


# --- what is told besides ---------------------------------------------------------------------------------------------


def _about_part(contents: Contents) -> Part:
    """Which class, backend, programs and kinds of optimizers the state comes from."""
    kinds = {held.name: _kind(held.optimizer) for held in contents.holdings.optimizers}

    def read() -> dict[str, Any]:
        return {
            "graph": contents.name,
            "backend": contents.builds[-1].backend if contents.builds else contents.settings.backend,
            "programs": [build.program.digest for build in contents.builds],
            "optimizers": kinds,
        }

    def load(value: Any, loading: Loading) -> None:
        saved = value.get("optimizers", {})
        loading.wrong += [
            f"{name} is the state of {saved[name]}; here it is {kind}"
            for name, kind in kinds.items()
            if name in saved and saved[name] != kind
        ]

    return Part(read, load, optional=True)


def _kind(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"
