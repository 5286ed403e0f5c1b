"""How two values differ, as a sentence that names what differs, down to the entry of a nested value.

Two values that read the same are told apart by what is in them. If that is the same too, one is another object of the
same form, and the sentence says so. No code of the user's runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from monograph.capture.guards.sources.attributes import attributes_of, isinstance_of, slots_of
from monograph.capture.guards.sources.closures import closure_of
from monograph.capture.guards.sources.places import Content, Slots
from monograph.capture.guards.sources.values import ABSENT, Mark, is_immutable, same
from monograph.ir.call.differences import change_text
from monograph.ir.call.reason import Cause

_DEPTH = 6  # of nested values that are looked into
_LONG = 32  # bytes
_NUMBERS = (int, float)  # that move once they have changed
_SHOWN = 200  # letters of a tuple
_SEQUENCES = (list, tuple, deque, set, frozenset, bytes)
_OF_ARRAYS = ("shape", "strides", "writable", "dtype", "values")
_OF_TENSORS = (
    "the class",
    "dtype",
    "device",
    "shape",
    "layout",
    "strides",
    "requires_grad",
    "the bit for conjugation",
    "the bit for negation",
    "is_leaf",
)


@dataclass(frozen=True)
class Order:
    """The keys of a dict in their order, recorded in the place of a value."""

    keys: tuple[Any, ...]


def cause_of(place: str, before: Any, now: Any, *, is_key: bool = False) -> Cause:
    """What kind of change it is that an attribute, a global or an entry has another value, or a dict another key."""
    if "_hooks" in place:
        return Cause.HOOK
    if place.endswith(".training") and type(before) is bool:
        return Cause.TRAINING
    moves = type(before) in _NUMBERS and type(now) is type(before) and not is_key
    return Cause.NUMBER if moves else Cause.VALUE


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What code can ask of a tensor besides its values, as `form_changed` takes it."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    form = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.layout, strides, tensor.requires_grad
    return type(tensor).__name__, *form, tensor.is_conj(), tensor.is_neg(), tensor.is_leaf


def form_changed(label: str, before: Sequence[Any], now: Sequence[Any]) -> str | None:
    """The first way in which the metadata of a tensor differs, as a sentence."""
    facts = zip(_OF_TENSORS, map(str, before), map(str, now), strict=True)
    return next(filter(None, (change_text(f"{what} of {label}", old, new) for what, old, new in facts)), None)


def changed(label: str, before: Any, now: Any) -> str:
    """What of `label` is no longer as it was, as a sentence."""
    return _difference(label, before, now, ()) or f"{label} is another {_kind(now)}, of the same form"


def _difference(label: str, before: Any, now: Any, inside: tuple[int, ...]) -> str | None:
    """None where nothing can be named but that it is another object; `inside` are the ids of the values around it."""
    if before is now or same(before, now):
        return None
    if isinstance(before, Order) and isinstance(now, Order):
        return keys_changed(label, before.keys, now.keys)
    if isinstance_of(before, torch.Tensor) and isinstance_of(now, torch.Tensor):
        return form_changed(label, form_of(before), form_of(now))
    if (found := change_text(label, show(before), show(now))) is not None:
        return found
    if isinstance_of(before, Mark):
        return f"{label} is another {_kind(now)}"
    if type(before) is not type(now):
        names = _full_name(type(before)), _full_name(type(now))
        return change_text(label, *names) or f"{label} is of another class of the same name, {names[0]}"
    if isinstance_of(before, type):
        return change_text(label, f"the class {_full_name(before)}", f"the class {_full_name(now)}")
    if id(before) in inside or len(inside) == _DEPTH:
        return None
    return _difference_inside(label, before, now, (*inside, id(before)))


def _difference_inside(label: str, before: Any, now: Any, inside: tuple[int, ...]) -> str | None:
    old, new = _parts(before), _parts(now)
    is_dict, is_sequence = (
        isinstance_of(before, dict),
        any(isinstance_of(before, kind) for kind in _SEQUENCES),
    )
    if is_sequence:
        found = change_text(f"the length of {label}", str(len(old)), str(len(new)))
    else:
        keys = [key for key, _ in old], [key for key, _ in new]
        found = keys_changed(label, *keys, what="key" if is_dict else "attribute")
    if found is not None:
        return found
    for (key, first), (_, second) in zip(old, new, strict=True):
        part = f"{label}[{show(key)}]" if is_dict or is_sequence else f"{label}.{key}"
        if (found := _difference(part, first, second, inside)) is not None:
            return found
    return None


def keys_changed(label: str, before: Sequence[Any], now: Sequence[Any], *, what: str = "key") -> str | None:
    """Keys that are new, or gone, or in another order."""
    old, new = (
        dict(zip(map(_known_by, before), before, strict=True)),
        dict(zip(map(_known_by, now), now, strict=True)),
    )
    for key in new:
        if key not in old:
            return f"{label} has a new {what} {show(new[key])}"
    for key in old:
        if key not in new:
            return f"{label} has no {what} {show(old[key])} any more"
    for key, other in zip(old, new, strict=True):
        if key != other:
            return f"the order of {label} changed: {show(new[other])} is where {show(old[key])} was"
    return None


def entry_changed(source: Content, position: int) -> str:
    """What of a dict is no longer as it was: its keys, or else the entry at a position."""
    before, now = source.recorded, source.now()
    keys, values = (
        [[value for (_, at), value in items.items() if at == part] for items in (before, now)]
        for part in (0, 1)
    )
    owner, _, table = source.label.rpartition(".")
    label, what = (owner, table[1:-1]) if source.is_registry else (source.label, "key")
    if (found := keys_changed(label, *keys, what=what)) is not None:
        return found
    key, old, new = keys[1][position], *(of_all[position] for of_all in values)
    return changed(f"{label}.{key}" if source.is_registry else f"{label}[{show(key)}]", old, new)


def elements_changed(source: Content, before: Any, now: Any) -> str:
    """That a list, a deque or a set has more elements, or fewer."""
    if any(isinstance_of(source.content, kind) for kind in (set, frozenset)):
        is_new = before is ABSENT
        return (
            f"{source.label} has {'a new' if is_new else 'no'} element {show(now if is_new else before)}"
            + ("" if is_new else " any more")
        )
    what = f"the length of {source.label}"
    return change_text(what, str(len(source.recorded)), str(len(source.now()))) or f"{what} changed"


def labels_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Values that are other ones now, by their labels, as sentences; or that their order is."""
    same_labels = True
    for label in dict.fromkeys([*before, *now]):
        old, new = before.get(label, ABSENT), now.get(label, ABSENT)
        if not same(old, new):
            same_labels = False
            yield changed(label, old, new)
    if same_labels and list(now) != list(before):
        yield "the order of param groups or of optimizer state changed"


def hidden_changed(label: str, before: Any, now: Any) -> str:
    """What of an object of another language changed: of an array its shape and dtype, else only that it did."""
    if type(before) is type(now) is tuple and len(before) == len(now) == len(_OF_ARRAYS):
        for what, old, new in zip(_OF_ARRAYS, before, now, strict=True):
            if not isinstance(old, bytes) and (
                found := change_text(f"{what} of {label}", str(old), str(new))
            ):
                return found
        return f"the values in {label} changed"
    return f"the content of {label} changed"


def _known_by(key: Any) -> Any:
    """What distinguishes a key from others, without its own methods."""
    return (type(key), repr(key)) if is_immutable(key) else id(key)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """What can be compared in a value, with its key, position, or name."""
    if isinstance_of(value, dict):
        return list(dict.items(value))
    for kind in _SEQUENCES:
        if isinstance_of(value, kind):
            return list(enumerate(kind.__iter__(value)))
    if isinstance_of(value, FunctionType):
        code = value.__code__
        made_of = {
            "__code__": f"{code.co_filename}:{code.co_firstlineno}",
            "__defaults__": value.__defaults__,
            "__kwdefaults__": value.__kwdefaults__,
            **closure_of(value),
        }
        return list(made_of.items())
    if isinstance_of(value, MethodType):
        return [("__func__", value.__func__), ("__self__", value.__self__)]
    slots = Slots("", value, slots_of(type(value))).now()
    return sorted({**slots, **(attributes_of(value) or {})}.items(), key=_name)


def _name(item: tuple[str, Any]) -> str:
    return str(item[0])


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _kind(value: Any) -> str:
    if isinstance_of(value, torch.Tensor):
        return "tensor"
    if isinstance_of(value, type):
        return f"class {value.__name__}"
    return f"function {value.__qualname__}" if isinstance_of(value, FunctionType) else type(value).__name__


def show(value: Any) -> str:
    """A value in a message."""
    if isinstance_of(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is float:
        return "a finite number"
    if isinstance_of(value, bytes) and len(value) > _LONG:
        return f"{len(value)} bytes"
    if is_immutable(value):
        text = repr(value)
        return text if type(value) is not tuple or len(text) < _SHOWN else f"{text[:_SHOWN]}..."
    if value is ABSENT or isinstance_of(value, Mark) or isinstance_of(value, Enum):
        return repr(value)
    if isinstance_of(value, type):
        return f"the class {value.__name__}"
    if isinstance_of(value, FunctionType):
        return f"the function {value.__qualname__}"
    if isinstance_of(value, BuiltinFunctionType):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"
