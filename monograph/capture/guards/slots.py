"""What is where in modules and optimizers: the state of a build by path, and what has taken its place since."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.capture.guards.optimizers import group_items, owner_name
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.reasons import changed
from monograph.capture.guards.sources.values import same
from monograph.capture.guards.weak import mark_for
from monograph.capture.tensors.sparse_parts import known_parts
from monograph.compat.distributed.tensors import is_sharded, local_of
from monograph.compat.modules import BUFFERS, PARAMETERS
from monograph.ir.call.differences import change_text
from monograph.ir.call.sparse import HELD, PARTS, form_of
from monograph.state.find import (
    Owned,
    average_slots,
    module_slots,
    scaler_slots,
    tensor_paths,
)
from monograph.state.spans import span
from monograph.state.swap import Swap

_FORM = (
    *("layout", "type", "dtype", "device", "shape", "strides", "requires_grad"),
    *("kind of memory", "place in its memory", "alignment"),
)
_ALIGNED = 64  # bytes: compiled code may count on it where torch's allocator gives it


@dataclass(frozen=True)
class Held:
    """A tensor at its place, with what it was like and where its memory began."""

    tensor: torch.Tensor
    form: tuple[Any, ...]
    pointer: int


@dataclass(frozen=True)
class Container:
    """A dict or list of an optimizer, or a sparse tensor: another one in its place means the same."""

    content: Any


@dataclass(frozen=True)
class OfModule:
    """A module, or a dict in it, or a mark for one."""

    part: Any


def layout_of(
    owned: Owned,
    owners: Mapping[str, Sequence[str] | None],
    counters: Collection[str],
    own: Sequence[OwnPlace] = (),
) -> dict[str, Any]:
    """By path what a build finds in modules, optimizers, a scaler and averages.

    `owners` are the names of those whose state counts, by optimizer; None for all that there are. `counters` are the
    paths of whole numbers in param groups that the step moves, `own` the places where it puts a new tensor.
    """
    modules = owned.named_modules()
    found: dict[str, Any] = {}
    for path, module in modules.items():
        found[f"the module {path}"] = OfModule(module)
        for name in (PARAMETERS, BUFFERS, "__dict__"):
            found[f"{name} of the module {path}"] = OfModule(getattr(module, name))
    slots = list(module_slots(modules)) + list(scaler_slots(owned.scaler))
    for average in owned.averages:
        slots += average_slots(average)
    for slot in slots:
        found |= _placed(slot.path, slot.tensor)
    in_modules = {(id(slot.container), slot.key) for slot in slots}
    for place in own:
        if (id(place.container), place.key) not in in_modules:
            if place.leaves is not None:
                found[place.path] = Container(place.get())
            found |= {f"{place.path}[{at}]": _seen(item) for at, item in enumerate(place.tensors())}
    names = tensor_paths(modules)
    for registered in owned.optimizers:
        found[registered.name] = registered.optimizer
        for index, group in enumerate(registered.optimizer.param_groups):
            found |= _in_group(f"{registered.name}/group{index}", group, counters)
        state = {owner_name(owner, names): entries for owner, entries in registered.optimizer.state.items()}
        known = owners.get(registered.name)
        for owner in state if known is None else known:
            if owner in state:
                found |= _nested(f"{registered.name}/{owner}", state[owner])
    return found


def without_modules(layout: Mapping[str, Any]) -> dict[str, Any]:
    """A layout to keep, which does not keep modules alive."""
    return {
        path: OfModule(mark_for(item.part)) if isinstance(item, OfModule) else item
        for path, item in layout.items()
    }


def _placed(path: str, tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor of state, or the parts of a sparse one; a DTensor with the part that this process has, which a step is given."""
    if is_sharded(tensor):
        return {path: _held(tensor), f"what this process has of {path}": _held(local_of(tensor))}
    if tensor.layout not in HELD:
        return {path: _held(tensor)}
    names, parts = PARTS[tensor.layout], known_parts(tensor)
    held = {f"{path}.{name}()": _held(part) for name, part in zip(names, parts, strict=True)}
    return {path: Container(tensor), f"the form of {path}": tuple(form_of(tensor)), **held}


def _in_group(path: str, group: dict[str, Any], counters: Collection[str]) -> dict[str, Any]:
    """A param group, its parameters first, wherever their key stands."""
    moved = frozenset((id(group), key) for key in group if f"{path}/{key}" in counters)
    parameters = {f"{path}/params/{position}": _held(item) for position, item in enumerate(group["params"])}
    others = {f"{path}/{key}": _seen(item) for key, item in group_items(group, moved)}
    return {path: Container(group), **parameters, **others}


def _nested(path: str, entry: Any) -> dict[str, Any]:
    """A piece of optimizer state, with all that is in it."""
    if type(entry) not in (dict, list):
        if is_sharded(entry):
            return _placed(path, entry)
        return {path: type(entry) if type(entry) in (int, float) else _seen(entry)}
    found: dict[str, Any] = {path: Container(entry)}
    for key, item in entry.items() if isinstance(entry, dict) else enumerate(entry):
        found |= _nested(f"{path}/{key}", item)
    return found


def _seen(item: Any) -> Any:
    return _held(item) if isinstance(item, torch.Tensor) else item


def _held(tensor: torch.Tensor) -> Held:
    if tensor.layout is not torch.strided:
        return Held(tensor, (tensor.layout,), 0)
    bits = tensor.is_conj(), tensor.is_neg(), tensor.is_inference(), tensor.is_leaf
    pointer = tensor.data_ptr()
    about = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    place = tensor.storage_offset(), pointer % _ALIGNED
    return Held(tensor, (tensor.layout, type(tensor), *about, bits, *place), pointer)


def replaced(before: Mapping[str, Any], now: Mapping[str, Any]) -> Swap | str:
    """What has taken the place of what; a sentence if something is of another form, is gone or is new."""
    new: dict[int, Any] = {}
    old: dict[int, Any] = {}
    swapped: dict[int, Any] = {}
    for path, was in before.items():
        if path not in now:
            return f"{path} is gone"
        if (different := _difference(path, was, now[path])) is not None:
            return different
        if not isinstance(was, (Held, Container)):
            continue
        first, second = _object(was), _object(now[path])
        if new.setdefault(id(first), second) is not second or old.setdefault(id(second), first) is not first:
            return f"{path} is one with other state, or no longer is"
        if first is not second or (isinstance(was, Held) and was.pointer != now[path].pointer):
            swapped[id(first)] = first
    for path in now:
        if path not in before:
            return f"{path} is new"
    if list(before) != list(now):
        return "the order of param groups or of optimizer state changed"
    return Swap({key: new[key] for key in swapped}, list(swapped.values()))


def _object(item: Any) -> Any:
    if isinstance(item, OfModule):
        return item.part
    return item.tensor if isinstance(item, Held) else item.content if isinstance(item, Container) else item


def _difference(path: str, was: Any, now: Any) -> str | None:
    """How the object at a path is of another form, as a sentence."""
    if isinstance(was, Held) and isinstance(now, Held):
        for what, before, after in zip(_FORM, was.form, now.form, strict=False):
            if before != after and not (what == "alignment" and after == 0):
                return change_text(f"{what} of {path}", str(before), str(after)) or changed(
                    path, before, after
                )
        return None
    if isinstance(was, Container) and isinstance(now, Container):
        alike = type(was.content) is type(now.content)
    elif isinstance(was, OfModule) and isinstance(now, OfModule):
        alike = same(was.part, now.part)
    else:
        alike = same(was, now)
    if alike:
        return None
    first, second = map(_object, (was, now))
    return changed(path, first, second)


def sharing(swap: Swap, given: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """True if a tensor that was replaced has, or had, memory in common with another one that the build is given.

    `given` are all of these, each with a tensor on the memory that it had.
    """
    apart = [position for position, (tensor, _) in enumerate(given) if id(tensor) in swap.new]
    after, before = [swap.of(tensor) for tensor, _ in given], [there for _, there in given]
    return any(_meets(tensors, apart) for tensors in (before, after))


def _meets(tensors: Sequence[torch.Tensor], apart: Sequence[int]) -> bool:
    """True if one of the tensors at these positions has memory in common with any other."""
    chosen = set(apart)
    spans = [(*span(tensor, whole=True), position in chosen) for position, tensor in enumerate(tensors)]
    end, together, is_chosen = 0, 0, False  # of the tensors that share one piece of memory
    for start, stop, this_one in sorted(spans):
        if start == stop:
            continue
        if start >= end:
            together, is_chosen = 0, False
        together, is_chosen, end = together + 1, is_chosen or this_one, max(end, stop)
        if together > 1 and is_chosen:
            return True
    return False
