"""Where Python keeps the attributes of objects and classes, found without running any code of the user's.

Nothing here calls `__getattr__`, a property or `__eq__`.
"""

from __future__ import annotations

import gc
import threading
import types
from typing import Any

from monograph.capture.guards.sources.values import ABSENT

Descriptor = types.MemberDescriptorType | types.GetSetDescriptorType
# what is guarded apart, and how C code lays objects out: where a partial keeps the address of its call, which the first call changes
NO_CONTENT = frozenset(
    {
        "__dict__", "__weakref__", "__class__", "__dictoffset__", "__weaklistoffset__", "__vectorcalloffset__",
    }
)  # fmt: skip
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code can change


def isinstance_of(value: Any, cls: type) -> bool:
    """`isinstance` that asks the type alone, not an object that says to be of another class."""
    return cls in type(value).__mro__


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes; None if it has none. No code of the user's runs."""
    look = (
        threading.local.__getattribute__ if isinstance_of(value, threading.local) else object.__getattribute__
    )
    try:
        found = look(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def class_table(cls: type) -> dict[str, Any]:
    """The dict that `cls.__dict__` is a proxy of."""
    table: dict[str, Any] = gc.get_referents(cls.__dict__)[0]
    return table


def put(owner: Any, part: Descriptor, value: Any) -> bool:
    """Give an attribute a value, ABSENT for none; False where C code does not let it be set."""
    try:
        part.__delete__(owner) if value is ABSENT else part.__set__(owner, value)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """The descriptors of `__slots__` in a class and its bases, the nearest first."""
    found: dict[str, types.MemberDescriptorType] = {}
    for cls in kind.__mro__:
        if cls.__flags__ & HEAP_TYPE:
            for name, value in cls.__dict__.items():
                if type(value) is types.MemberDescriptorType and name not in NO_CONTENT:
                    found.setdefault(name, value)
    return found


def is_changeable(cls: type) -> bool:
    """True for classes whose attributes can be set."""
    return bool(cls.__flags__ & HEAP_TYPE) and not cls.__flags__ & (1 << 8)
