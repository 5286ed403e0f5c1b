"""Where values live that are in no state dict of torch, and which of them steps change."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from monograph.capture.guards.sources.values import is_plain
from monograph.compat.modules import buffers_of, parameters_of, submodules_of
from monograph.compat.tensors import storage_key
from monograph.compiler import Build
from monograph.ir.call.nested import tensors_in
from monograph.ir.port import FREE
from monograph.numerics.judge import same_bits
from monograph.state.find import Owned, module_slots
from monograph.state_dict.merge import misfits
from monograph.user_code.lines import warn_at_user_line

_OF_MODULES = frozenset(vars(nn.Module()))
_OF_GRAPH = "graph."
_DICTS = (dict, defaultdict, OrderedDict)
_NUMBERS = frozenset({type(None), bool, int, float, complex, str, bytes})


@dataclass(frozen=True)
class Place:
    """Where a value lives, outside of what state dicts hold."""

    table: dict[str, Any]
    name: str
    is_buffer: bool = False

    @property
    def value(self) -> Any:
        """What lives there now."""
        return self.table.get(self.name)

    def misfits(self, saved: Any, path: str) -> Iterator[str]:
        """What speaks against a saved value; an attribute may get another shape from a step, a buffer not."""
        live = self.value
        if self.is_buffer:
            yield from misfits(live, saved, path)
        elif live is not None and saved is not None and not _alike(live, saved):
            yield f"{path} is a {type(saved).__name__}; here it is a {type(live).__name__}"


def _alike(live: Any, saved: Any) -> bool:
    return type(live) is type(saved) or (isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor))


def all_places(owned: Owned) -> dict[str, Place]:
    """By path every attribute and buffer whose value is in no state dict."""
    saved = {
        id(tensor)
        for module in owned.modules.values()
        for tensor in module.state_dict(keep_vars=True).values()
    }
    owner = vars(owned.owner)
    found = {
        f"{_OF_GRAPH}{name}": Place(owner, name)
        for name in owner
        if not name.startswith("_") and name not in owned.modules
    }
    for path, module in owned.named_modules().items():
        attributes = {name: Place(vars(module), name) for name in vars(module) if name not in _OF_MODULES}
        buffers = {name: Place(buffers_of(module), name, is_buffer=True) for name in buffers_of(module)}
        for name, place in {**buffers, **attributes}.items():
            tensors = [tensor for tensor in tensors_in(place.value) if not is_lazy(tensor)]
            if not tensors or any(id(tensor) not in saved for tensor in tensors):
                found[f"{path}.{name}"] = place
    return found


def new_place(path: str, modules: Mapping[str, nn.Module]) -> Place | None:
    """An attribute that a step of another process made, and none of this graph has made so far."""
    owner, _, name = path.rpartition(".")
    module = modules.get(owner)
    if module is None or name in _OF_MODULES:
        return None
    if any(name in table(module) for table in (parameters_of, buffers_of, submodules_of)):
        return None
    return Place(vars(module), name)


def early_places(places: Mapping[str, Place]) -> set[str]:
    """The paths of what a first step may change: tensors, and lists and dicts of numbers of the graph itself."""
    return {
        path
        for path, place in places.items()
        if tensors_in(place.value)
        or (path.startswith(_OF_GRAPH) and type(place.value) in (list, *_DICTS) and _holds(place.value))
    }


# --- what steps change -------------------------------------------------------------------------------------------------


def changed_places(builds: Sequence[Build], places: Mapping[str, Place], owned: Owned) -> set[str]:
    """The paths among `places` that steps write to; warns of what a step changes and no path leads to."""
    homes = {id(tensor): path for path, place in places.items() for tensor in tensors_in(place.value)}
    written = [path for build in builds for path in _written(build, homes)]
    written += [write.about.partition(" (")[0] for build in builds for write in build.captured.writes]
    written += [label for build in builds for label in build.captured.lists_grown()]
    in_modules = {slot.path for slot in module_slots(owned.named_modules())}
    found, lost = set(), []
    for path in dict.fromkeys(written):
        root = next((root for root in _roots(path) if root in places and _holds(places[root].value)), None)
        if root is not None:
            found.add(root)
        elif path not in in_modules and "/" not in path:
            lost.append(path)
    if lost:
        roots = dict.fromkeys(root for path in lost for root in _roots(path) if root in places)
        unfit = "".join(f"{why}; " for root in roots if (why := _unfit(places[root].value, root)))
        warn_at_user_line(
            f"a step changes {', '.join(lost)}, for which the state has no place: it is not saved; {unfit}hold tensors in buffers of a module "
            "and numbers in its attributes; register_state(name, object) saves what else has state_dict() and load_state_dict()"
        )
    shown = {id(places[path].value) for path in found if isinstance(places[path].value, torch.Tensor)}
    return found | {path for path, place in places.items() if id(place.value) in shown}


def _written(build: Build, homes: Mapping[int, str]) -> Iterator[str]:
    """The paths of what a step writes; `homes` has those of tensors that a program knows by no path of theirs."""
    for _, port in build.program.updates():
        if not port.path.startswith(FREE):
            yield port.path
        elif port.path in build.guards.tensors:  # a build that has let go of its tensors has a successor
            path = port.path.removeprefix(FREE)
            yield homes.get(id(build.guards.tensors[port.path]), port.path if path.isdigit() else path)


def _holds(value: Any) -> bool:
    """True for values that can be saved: tensors, numbers and names, and lists, tuples and dicts of them."""
    return bool(tensors_in(value)) or is_plain(value) or _is_of_numbers(value)


def _is_of_numbers(value: Any) -> bool:
    """True for numbers and names in lists, tuples and dicts, all of classes that a checkpoint can hold."""
    kind = type(value)
    if kind in _DICTS:
        return all(map(_is_of_numbers, (*value, *value.values())))
    return (
        all(map(_is_of_numbers, value)) if kind in (list, tuple) else type(without_numpy(value)) in _NUMBERS
    )


def without_numpy(value: Any) -> Any:
    """A number or name of NumPy as that of Python which is equal."""
    return value.item() if isinstance(value, np.generic) else value


def _unfit(value: Any, path: str) -> str:
    """What in an attribute keeps it from being saved; empty if it is none of numbers."""
    kind = type(value)
    if kind in _DICTS or kind in (list, tuple):
        items = value.items() if kind in _DICTS else enumerate(value)
        return next(filter(None, (_unfit(item, f"{path}[{key!r}]") for key, item in items)), "")
    fits = isinstance(value, torch.Tensor) or is_plain(value) or _is_of_numbers(value)
    return (
        "" if fits else f"{path} is a {kind.__name__}, with which none of {path.partition('[')[0]} is saved"
    )


def _roots(path: str) -> Iterator[str]:
    """`model.memory[0]` and `model.memory`: the path, and those of what holds it."""
    yield path
    for position in range(len(path) - 1, 0, -1):
        if path[position] in "[.":
            yield path[:position]


# --- memory ------------------------------------------------------------------------------------------------------------


def num_holders(owned: Owned, places: Mapping[str, Place]) -> Counter[int]:
    """How many tensors share each memory. What is written to one of several changes the others."""
    tensors = {slot.path: [slot.tensor] for slot in module_slots(owned.named_modules())}
    tensors |= {path: tensors_in(place.value) for path, place in places.items()}
    return Counter(key for found in tensors.values() for key in memories(found))


def memories(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The memory of each tensor that has any: one without elements has none."""
    return [storage_key(tensor) for tensor in tensors if not is_lazy(tensor) and tensor.numel()]


def has_own_memory(
    path: str, given: Mapping[str, Any], places: Mapping[str, Place], holders: Counter[int]
) -> bool:
    """True if a value may be written where it is; also for one tensor at several places that get one value."""
    value, saved = places[path].value, given[path]
    keys = memories(tensors_in(value))
    if all(holders[key] == 1 for key in keys):
        return True
    tied = [other for other, place in places.items() if place.value is value]
    return (
        isinstance(value, torch.Tensor)
        and isinstance(saved, torch.Tensor)
        and holders[keys[0]] == len(tied)
        and all(other in given and same_bits(given[other], saved) for other in tied)
    )
