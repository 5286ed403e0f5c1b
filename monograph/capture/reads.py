"""Which plain attributes did build() read? They are guarded facts: a later change means a new build."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_TABLES = frozenset(
    {
        "__dict__",
        "__class__",
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "training",
    }
)
_NUMBERS_AND_NAMES = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_CONTAINERS = (torch.Tensor, nn.Module, Optimizer, dict, list, set)
MISSING = object()


def is_plain(value: object) -> bool:
    """True for values that are compared by equality: numbers, strings, None, enums, tuples of them."""
    if isinstance(value, tuple):
        return all(is_plain(item) for item in value)
    return isinstance(value, _NUMBERS_AND_NAMES)


@dataclass
class Reads:
    """What was read first and what was written first, by object and attribute name."""

    facts: dict[tuple[int, str], Any] = field(default_factory=dict)  # in the instance: value when first read
    class_facts: dict[tuple[int, str], Any] = field(default_factory=dict)  # found on the class
    written: set[tuple[int, str]] = field(default_factory=set)
    objects: dict[int, Any] = field(default_factory=dict)

    def note_read(self, owner: Any, name: str, value: Any) -> None:
        """Remember the first value seen of an attribute, unless build() itself wrote it before."""
        key = (id(owner), name)
        if name in _TABLES or key in self.facts or key in self.written or key in self.class_facts:
            return
        entries = object.__getattribute__(owner, "__dict__")
        if name in entries:
            if not isinstance(value, _CONTAINERS):
                self.facts[key] = value
                self.objects[id(owner)] = owner
        elif name == "forward" or (not name.startswith("_") and is_plain(value) and not callable(value)):
            self.class_facts[key] = MISSING if name == "forward" else value
            self.objects[id(owner)] = owner

    def note_write(self, owner: Any, name: str) -> None:
        """Remember that build() set an attribute."""
        self.written.add((id(owner), name))

    def was_read(self, owner: Any, name: str) -> bool:
        """True if build() read the attribute before it wrote it."""
        return (id(owner), name) in self.facts


@contextmanager
def record_reads(owner: Any) -> Iterator[Reads]:
    """Record reads and writes of attributes of modules, of the graph `owner` and of objects it holds."""
    reads, thread = Reads(), threading.get_ident()
    own = {id(owner)} | {id(held) for held in _held_objects(owner)}

    def watched(item: Any) -> bool:
        return threading.get_ident() == thread and (isinstance(item, nn.Module) or id(item) in own)

    with ExitStack() as stack:
        for cls in {nn.Module, _root_class(owner), *(type(held) for held in _held_objects(owner))}:
            _spy(stack, cls, reads, watched)
        yield reads


def _held_objects(owner: Any) -> list[Any]:
    """Objects of the user's own classes that the graph holds directly, such as a loss that is no module."""
    skipped = (nn.Module, Optimizer, torch.Tensor, type, FunctionType, MethodType, BuiltinFunctionType)
    return [
        held
        for name, held in vars(owner).items()
        if not name.startswith("_")
        and hasattr(held, "__dict__")
        and not isinstance(held, skipped)
        and type(held).__module__.partition(".")[0] not in ("torch", "monograph", "builtins", "threading")
    ]


def _root_class(owner: Any) -> type:
    """The class right under object: patching it reaches every subclass."""
    return type(owner).__mro__[-2]


def _spy(stack: ExitStack, cls: type, reads: Reads, watched: Callable[[Any], bool]) -> None:
    get, put = cls.__getattribute__, cls.__setattr__
    own_get, own_put = "__getattribute__" in cls.__dict__, "__setattr__" in cls.__dict__

    def spying_get(self: Any, name: str) -> Any:
        value = get(self, name)
        if name[:2] != "__" and watched(self):
            reads.note_read(self, name, value)
        return value

    def spying_put(self: Any, name: str, value: Any) -> None:
        if watched(self):
            reads.note_write(self, name)
        put(self, name, value)

    try:
        cls.__getattribute__ = spying_get  # type: ignore[method-assign]
        cls.__setattr__ = spying_put  # type: ignore[method-assign,assignment]
    except TypeError:  # a class written in C: its attributes cannot be watched, nor set by most users
        return

    def put_back() -> None:
        for name, before, own in (("__getattribute__", get, own_get), ("__setattr__", put, own_put)):
            if own:
                setattr(cls, name, before)
            else:
                delattr(cls, name)

    stack.callback(put_back)
