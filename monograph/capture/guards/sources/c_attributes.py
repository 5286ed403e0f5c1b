"""Attributes that objects keep outside of any dict: those of functions, classes, and other objects written in C.

`f.__name__`, `error.args`, `table.default_factory`. They are found through the descriptors that C puts into its classes,
and count if code names them; fields that can be set count always, since C code reads them without a name.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from monograph.capture.guards.sources.attributes import NO_CONTENT, Descriptor, is_changeable, put
from monograph.capture.guards.sources.places import Source
from monograph.capture.guards.sources.values import ABSENT, same

_OF_CLASSES = frozenset({"__name__", "__qualname__"})  # all others are in dicts, or are the bases
# what is made once, and has nothing that can be set but a text about it
_FIXED = frozenset(
    {
        types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
        types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType,
        types.MemberDescriptorType, types.CodeType, types.MappingProxyType, property, staticmethod, classmethod,
    }
)  # fmt: skip


@dataclass(eq=False)
class KeptByC(Source):
    """Some attributes of an object that C code keeps for it."""

    owner: Any
    parts: dict[str, Descriptor] = field(default_factory=dict)  # growing while code runs

    def now(self) -> Mapping[Any, Any]:
        found = {name: read(self.owner, part) for name, part in self.parts.items()}
        return {name: value for name, value in found.items() if value is not ABSENT}

    def item_label(self, key: Any) -> str:
        return f"{self.label}.{key}"

    def restore(self, key: Any, value: Any) -> bool:
        return put(self.owner, self.parts[key], value)

    def add(self, name: str, part: Descriptor) -> bool:
        """Let an attribute count; False if it gives another object at each look."""
        if not same(read(self.owner, part), read(self.owner, part)):
            return False
        self.parts[name] = part
        return True


def read(owner: Any, part: Descriptor) -> Any:
    """What an attribute is now; ABSENT if it has no value."""
    try:
        return part.__get__(owner)
    except Exception:  # C code may raise anything
        return ABSENT


def parts_of(value: Any) -> Mapping[str, Descriptor]:
    """By name the attributes that C code keeps for an object."""
    kind = type(value)
    if kind in _FIXED:
        return {}
    return _of_class() if issubclass(kind, type) else _of_kind(kind)


def is_field(part: Descriptor) -> bool:
    """True for a place in the memory of the object; others are computed."""
    return type(part) is types.MemberDescriptorType


def can_be_set(value: Any, part: Descriptor) -> bool:
    """False for a field that stays as it is. It is tried with the value that is there."""
    now = read(value, part)
    return not is_field(part) or (now is not ABSENT and put(value, part, now))


@cache
def _of_class() -> Mapping[str, Descriptor]:
    return {name: part for name, part in _of_kind(type).items() if name in _OF_CLASSES}


def _of_kind(kind: type) -> Mapping[str, Descriptor]:
    found: dict[str, Descriptor] = {}
    for cls in kind.__mro__[:-1]:
        if not is_changeable(cls):
            for name, part in vars(cls).items():
                if isinstance(part, Descriptor) and name not in NO_CONTENT:
                    found.setdefault(name, part)
    return found
