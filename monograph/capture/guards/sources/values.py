"""What an object is to a guard: immutable values are the same if nothing can tell them apart, others if they are one object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch

from monograph.ir.call.numbers import exactly

ABSENT = type("Absent", (), {"__repr__": lambda _self: "absent"})()
_MORE_THAN_EQUAL = frozenset({float, complex, range})  # equal ones may differ
_IMMUTABLE = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range,
        torch.dtype, torch.device, torch.layout, torch.memory_format,
    }
)  # fmt: skip
_MANY = (tuple, frozenset, torch.Size)  # as immutable as what is in them: a size may vary


_NUMBERS_AND_NAMES = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
CONTAINERS = (list, dict, set, deque)
_FEW_NUMBERS = 64


class Mark:
    """Recorded in the place of a value: says by itself which values may be there."""

    def fits(self, value: Any) -> bool:
        """True if the value may be there."""
        raise NotImplementedError


@dataclass(frozen=True)
class Moves(Mark):
    """Recorded in the place of a number that a step moves itself: any number of its kind may be there."""

    kind: type

    def fits(self, value: Any) -> bool:
        return type(value) is self.kind

    def __repr__(self) -> str:
        return "a number that moves"


@dataclass(frozen=True)
class MovesInside(Moves):
    """Recorded in the place of a list, tuple or dict of numbers that move: another one may be there, of the same form."""

    form: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> MovesInside | None:
        """That for values of the same form as this one; None if it is no list, tuple or dict of a few numbers alone."""
        kind = type(value)
        if kind not in (list, tuple, dict) or not 0 < len(value) <= _FEW_NUMBERS:
            return None
        entries = list(value.items()) if kind is dict else list(enumerate(value))
        if not all(type(key) in (int, str) and type(item) in (int, float) for key, item in entries):
            return None
        return cls(kind, tuple((key, type(item)) for key, item in entries))

    def fits(self, value: Any) -> bool:
        return MovesInside.of(value) == self

    def __repr__(self) -> str:
        return f"a {self.kind.__name__} of numbers that move"


def is_immutable(value: object) -> bool:
    """True for values that are compared by their type and value: numbers, texts, None, and tuples of them."""
    kind = type(value)
    if kind in _MANY:
        return all(map(is_immutable, value))  # type: ignore[call-overload]
    return kind in _IMMUTABLE


def same(before: Any, now: Any) -> bool:
    """True for one object, and for immutable values that nothing can tell apart.

    `1` and `True`, `0.0` and `-0.0` are different; so are sets whose order differs. Two methods are the same if they are
    one function of one object: Python makes such a method anew each time it is asked for.
    """
    if before is now:
        return True
    kind = type(before)
    if issubclass(kind, Mark):
        return bool(before.fits(now))
    if kind is not type(now):
        return False
    if kind is MethodType:
        return before.__func__ is now.__func__ and before.__self__ is now.__self__
    if kind in _MANY:
        first, second = tuple(before), tuple(now)
        return len(first) == len(second) and all(map(same, first, second))
    if kind in _MORE_THAN_EQUAL:
        return exactly(before) == exactly(now)
    return kind in _IMMUTABLE and bool(before == now)


def is_plain(value: object) -> bool:
    """True for values that are compared by equality: numbers, strings, None, enums, tuples of them."""
    kind = type(value)  # a proxy whose object is gone raises where it is asked for its class
    if issubclass(kind, tuple):
        return all(map(is_plain, value))  # type: ignore[call-overload]
    return issubclass(kind, _NUMBERS_AND_NAMES)


def items_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a list, tuple, dict, set or namespace, each with its key; nothing for other objects."""
    if isinstance(container, dict):
        yield from container.items()
    elif isinstance(container, (list, tuple, set, deque)):
        yield from enumerate(container)
    elif is_namespace(container):
        yield from vars(container).items()


def is_namespace(value: object) -> bool:
    """True for `types.SimpleNamespace`, whose class is written in C: reads of it cannot be seen."""
    return type(value).__module__ == "types" and hasattr(value, "__dict__") and not callable(value)
