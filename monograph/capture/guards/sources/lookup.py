"""Places that code can read from, and how to look at them without running any code of the user's.

Each source gives its present content as a mapping from a key to an object. Nothing here calls `__getattr__`, a
property or `__eq__` of the user's.
"""

from __future__ import annotations

import array
import contextvars
import decimal
import gc
import io
import sys
import threading
import types
import weakref
from _random import Random as Twister
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.compat.modules import MODULE_TABLES
from monograph.ir.call.numbers import exactly
from monograph.ir.call.tree import dict_class

ABSENT = type("Absent", (), {"__repr__": lambda _self: "absent"})()
_MORE_THAN_EQUAL = frozenset({float, complex, range})  # equal ones may differ
_IMMUTABLE = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    }
)  # fmt: skip
# what Python, dataclasses and pickling write into a class, also later on, and no step reads
_ABOUT_CLASSES = frozenset(
    {
        "__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__firstlineno__",
        "__static_attributes__", "__parameters__", "__orig_bases__", "__abstractmethods__", "__slotnames__",
        "__annotate__", "__annotate_func__", "__annotations_cache__", "__type_params__",
    }
)  # fmt: skip

Descriptor = types.MemberDescriptorType | types.GetSetDescriptorType
# what is guarded apart, and how C code lays objects out: where a partial keeps the address of its call, which the first call changes
NO_CONTENT = frozenset(
    {
        "__dict__", "__weakref__", "__class__", "__dictoffset__", "__weaklistoffset__", "__vectorcalloffset__",
    }
)  # fmt: skip
# modules of the standard library; the last has what later versions of it have
STANDARD = (sys.stdlib_module_names - {"__main__"}) | {"typing_extensions"}
_CACHE_OF_SUBCLASSES = "_abc_impl"  # of abstract classes: moves whenever `isinstance` is asked


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


def is_immutable(value: object) -> bool:
    """True for values that are compared by their type and value: numbers, texts, None, and tuples of them."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_immutable, value))  # type: ignore[call-overload]
    return kind in _IMMUTABLE


def same(before: Any, now: Any) -> bool:
    """True for one object, and for immutable values that nothing can tell apart.

    `1` and `True`, `0.0` and `-0.0` are different; so are sets whose order differs.
    """
    if before is now:
        return True
    kind = type(before)
    if issubclass(kind, Mark):
        return bool(before.fits(now))
    if kind is not type(now):
        return False
    if kind is tuple or kind is frozenset:
        first, second = tuple(before), tuple(now)
        return len(first) == len(second) and all(map(same, first, second))
    if kind in _MORE_THAN_EQUAL:
        return exactly(before) == exactly(now)
    return kind in _IMMUTABLE and bool(before == now)


@dataclass(eq=False)
class Source:
    """A place to read from. `recorded` is what was there before code that can read it ran."""

    label: str
    recorded: dict[Any, Any] = field(default_factory=dict, kw_only=True)
    followed: bool = field(default=True, kw_only=True)  # what the entries refer to counts too

    def now(self) -> Mapping[Any, Any]:
        """The content now, of what is relevant."""
        raise NotImplementedError

    def item_label(self, key: Any) -> str:
        """What a user calls an entry."""
        return self.label

    def replace(self, content: Mapping[Any, Any]) -> bool:
        """Put a content there, as `now` gave it; False where that cannot be done."""
        now = self.now()
        for key in [*content, *(key for key in now if key not in content)]:
            value = content.get(key, ABSENT)
            if now.get(key, ABSENT) is not value and not self.restore(key, value):
                return False
        return True

    def restore(self, key: Any, value: Any) -> bool:
        """Put an entry back; False where that cannot be done."""
        return False

    def table(self) -> dict[Any, Any] | None:
        """The dict that the source is in: while it is unchanged, so is the source."""
        return None

    def container(self) -> Any:
        """The mutable object that `restore` writes into, for those that keep a copy of it elsewhere."""
        return self.table()


@dataclass(eq=False)
class Entries(Source):
    """Entries of a dict that belongs to an object: attributes, globals. Only those with a relevant name count."""

    entries: dict[str, Any]
    names: set[str]  # shared with others, and growing while code runs
    whole: bool = field(default=False, kw_only=True)  # every entry counts
    excluded: frozenset[str] = field(default=frozenset(), kw_only=True)
    # what was there under names that code only stores to: nothing depends on it, but it is put back
    overwritten: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def now(self) -> Mapping[Any, Any]:
        entries, names, excluded = self.entries.copy(), self.names, self.excluded
        if self.whole and not excluded:
            return entries
        return {
            name: entries[name] for name in entries if (self.whole or name in names) and name not in excluded
        }

    def item_label(self, key: Any) -> str:
        return f"{self.label}.{key}"

    def restore(self, key: Any, value: Any) -> bool:
        if value is ABSENT:
            self.entries.pop(key, None)
        else:
            self.entries[key] = value
        return True

    def table(self) -> dict[Any, Any] | None:
        return self.entries


@dataclass(eq=False)
class ClassEntries(Entries):
    """Entries of a class: those with a relevant name, and special methods, which Python finds without naming them."""

    cls: type

    def now(self) -> Mapping[Any, Any]:
        names = self.names
        return {
            name: value
            for name, value in self.entries.copy().items()
            if name != _CACHE_OF_SUBCLASSES
            and (self.whole or name in names or (name[:2] == "__" and name not in _ABOUT_CLASSES))
        }

    def restore(self, key: Any, value: Any) -> bool:
        if value is ABSENT:
            delattr(self.cls, key)
        else:
            setattr(self.cls, key, value)
        return True


@dataclass(eq=False)
class Content(Source):
    """The whole content of a dict, list, deque or set, with its order."""

    content: Any

    @property
    def is_registry(self) -> bool:
        """True for the parameters, buffers or modules of a module."""
        return self.label.rpartition(".")[2] in MODULE_TABLES

    def now(self) -> Mapping[Any, Any]:
        content = self.content
        if isinstance(content, dict):
            items = list(_items_of(content))
            return {(position, part): item[part] for position, item in enumerate(items) for part in (0, 1)}
        if isinstance(content, list):
            return dict(enumerate(list.__iter__(content)))
        return dict(enumerate(tuple(content) if isinstance(content, deque) else set.__iter__(content)))

    def item_label(self, key: Any) -> str:
        if isinstance(self.content, dict):
            keys = [key for key, _ in _items_of(self.content)]
            if key[0] >= len(keys):
                return f"the length of {self.label}"
            owner, _, table = self.label.rpartition(".")
            return f"{owner}.{keys[key[0]]}" if table in MODULE_TABLES else f"{self.label}[{keys[key[0]]!r}]"
        return f"{self.label}[{key}]" if isinstance(self.content, (list, deque)) else self.label

    def replace(self, content: Mapping[Any, Any]) -> bool:
        values, live = list(content.values()), self.content
        if isinstance(live, dict):
            kind = dict_class(live)
            kind.clear(live)
            kind.update(live, zip(values[::2], values[1::2], strict=True))
        elif isinstance(live, list):
            list.__setitem__(live, slice(None), values)
        else:
            live.clear()
            live.extend(values) if isinstance(live, deque) else live.update(values)
        return True

    def table(self) -> dict[Any, Any] | None:
        # an OrderedDict keeps its order outside of the dict
        return self.content if isinstance(self.content, dict) and not is_ordered(self.content) else None

    def container(self) -> Any:
        return self.content


def is_ordered(content: Any) -> bool:
    """True for an OrderedDict."""
    return OrderedDict in type(content).__mro__


def _items_of(content: dict[Any, Any]) -> Any:
    return OrderedDict.items(content) if is_ordered(content) else dict.items(content)  # type: ignore[arg-type]


@dataclass(eq=False)
class Slots(Source):
    """The slots of an object, by the descriptors that Python made for `__slots__`."""

    owner: Any
    slots: Mapping[str, types.MemberDescriptorType]

    def now(self) -> Mapping[Any, Any]:
        found = {}
        for name, slot in self.slots.items():
            try:
                found[name] = slot.__get__(self.owner)
            except AttributeError:  # it has no value
                continue
        return found

    def item_label(self, key: Any) -> str:
        return f"{self.label}.{key}"

    def restore(self, key: Any, value: Any) -> bool:
        return put(self.owner, self.slots[key], value)


class Variable:
    """The variable of a cell, to be read and set as the one entry of a container."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it has no value
            raise KeyError(key) from None

    def __setitem__(self, _key: str, value: Any) -> None:
        self._cell.cell_contents = value


@dataclass(eq=False)
class Closure(Source):
    """A variable that functions share."""

    cell: types.CellType

    def __post_init__(self) -> None:
        self.variable = Variable(self.cell)

    def now(self) -> Mapping[Any, Any]:
        try:
            return {"": self.cell.cell_contents}
        except ValueError:  # it has no value yet
            return {}

    def restore(self, key: Any, value: Any) -> bool:
        if value is ABSENT:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value
        return True


@dataclass(eq=False)
class Function(Source):
    """What a function is made of: its code and the defaults of its parameters."""

    function: types.FunctionType

    def now(self) -> Mapping[Any, Any]:
        function = self.function
        return {
            "__code__": function.__code__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
        }

    def item_label(self, key: Any) -> str:
        return f"{self.label}.{key}"

    def restore(self, key: Any, value: Any) -> bool:
        setattr(self.function, key, value)
        return True


@dataclass(eq=False)
class Kind(Source):
    """The class of an object, and the dict that holds its attributes."""

    owner: Any
    has_dict: bool

    def now(self) -> Mapping[Any, Any]:
        kind: dict[Any, Any] = {"__class__": type(self.owner)}
        if self.has_dict:
            kind["__dict__"] = attributes_of(self.owner)
        return kind

    def item_label(self, key: Any) -> str:
        return f"{self.label}.{key}"

    def restore(self, key: Any, value: Any) -> bool:
        object.__setattr__(self.owner, key, value)
        return True


@dataclass(eq=False)
class Bases(Source):
    """The classes that a class takes its attributes from."""

    cls: type

    def now(self) -> Mapping[Any, Any]:
        return {"__mro__": self.cls.__mro__}

    def item_label(self, key: Any) -> str:
        return f"{self.label}.{key}"


@dataclass(eq=False)
class Subclasses(Source):
    """The classes that are made from a class, which knows them weakly."""

    cls: type

    def now(self) -> Mapping[Any, Any]:
        return dict(enumerate(type.__subclasses__(self.cls)))

    def item_label(self, key: Any) -> str:
        return f"{self.label}.__subclasses__()[{key}]"


@dataclass(eq=False)
class Probe(Source):
    """What an object of another language holds, read by a function that changes nothing."""

    owner: Any
    reader: Reader

    def now(self) -> Mapping[Any, Any]:
        try:
            return {"": self.reader.read(self.owner)}
        except Exception:  # released, or of another thread
            return {}

    def restore(self, key: Any, value: Any) -> bool:
        if self.reader.write is None:
            return False
        self.reader.write(self.owner, value)
        return True


@dataclass(frozen=True)
class Reader:
    """How to read what an object hides, and how to put it back where that can be done."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None = None


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
        if cls.__flags__ & _HEAP_TYPE:
            for name, value in cls.__dict__.items():
                if type(value) is types.MemberDescriptorType and name not in NO_CONTENT:
                    found.setdefault(name, value)
    return found


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code can change


def is_changeable(cls: type) -> bool:
    """True for classes whose attributes can be set."""
    return bool(cls.__flags__ & _HEAP_TYPE) and not cls.__flags__ & (1 << 8)


def _bytes(value: Any) -> bytes:
    return memoryview(value).tobytes()


def _write_bytes(value: Any, content: bytes) -> None:
    if isinstance(value, bytearray):
        value[:] = content
    elif isinstance(value, array.array):
        del value[:]
        value.frombytes(content)
    else:
        memoryview(value).cast("B")[:] = content


def _array(value: Any) -> Any:
    content = tuple(value.ravel().tolist()) if value.dtype.hasobject else value.tobytes()
    return value.shape, value.strides, value.flags.writeable, str(value.dtype), content


def held_in_array(value: Any) -> list[Any]:
    """The objects that an array of numpy holds; none for any other object."""
    is_array = any(cls.__module__ == "numpy" and cls.__name__ == "ndarray" for cls in type(value).__mro__)
    return list(value.ravel().tolist()) if is_array and value.dtype.hasobject else []


def _frozen(item: Any) -> Any:
    """A state of numpy's as nested tuples, which are compared by value."""
    if isinstance(item, dict):
        return "dict", tuple((key, _frozen(value)) for key, value in item.items())
    return ("array", str(item.dtype), item.tobytes()) if hasattr(item, "tobytes") else item


def _thawed(item: Any) -> Any:
    if not isinstance(item, tuple):
        return item
    if item[0] == "dict":
        return {key: _thawed(value) for key, value in item[1]}
    return sys.modules["numpy"].frombuffer(item[2], item[1])


def _generator_state(value: Any) -> Any:
    return _frozen(value.bit_generator.state)


def _set_generator_state(value: Any, state: Any) -> None:
    value.bit_generator.state = _thawed(state)


def _bits_state(value: Any) -> Any:
    return _frozen(value.state)


def _set_bits_state(value: Any, state: Any) -> None:
    value.state = _thawed(state)


def _legacy_state(value: Any) -> Any:
    return _frozen(value.get_state(legacy=False))


def _set_legacy_state(value: Any, state: Any) -> None:
    value.set_state(_thawed(state))


def _place_of_generator(value: Any) -> Any:
    frame = value.gi_frame
    return None if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))


def _place_of_iterator(value: Any) -> Any:
    return _reduced(value.__reduce__())


def _reduced(item: Any) -> Any:
    """What an iterator says of its place, as texts and numbers that later ones can be compared with."""
    if isinstance(item, tuple):
        return tuple(map(_reduced, item))
    if hasattr(type(item), "__next__"):
        return _reduced(item.__reduce__())
    return item if is_immutable(item) else id(item)


def _written(value: Any) -> Any:
    return value.getvalue(), value.tell()


def _write_anew(value: Any, content: tuple[Any, int]) -> None:
    value.seek(0)
    value.truncate()
    value.write(content[0])
    value.seek(content[1])


def _settings(value: decimal.Context) -> Any:
    return (
        *(value.prec, value.rounding, value.Emin, value.Emax, value.capitals, value.clamp),
        *(str(value.traps), str(value.flags)),
    )


def _value_of_context(value: contextvars.ContextVar[Any]) -> Any:
    return value.get(ABSENT)


def _set_context(value: contextvars.ContextVar[Any], content: Any) -> None:
    value.set(None if content is ABSENT else content)  # what has had no value cannot lose the one it has


_NUMPY = {
    "ndarray": Reader(_array),
    "Generator": Reader(_generator_state, _set_generator_state),
    "BitGenerator": Reader(_bits_state, _set_bits_state),
    "SeedSequence": Reader(lambda value: _frozen(value.state)),
    "RandomState": Reader(_legacy_state, _set_legacy_state),
}
_HIDING: tuple[tuple[type, Reader], ...] = (
    # what random.Random hides; its other half, the second of two normal numbers, is an attribute
    (Twister, Reader(Twister.getstate, Twister.setstate)),
    (io.StringIO, Reader(_written, _write_anew)),
    (io.BytesIO, Reader(_written, _write_anew)),
    (decimal.Context, Reader(_settings)),
    (contextvars.Context, Reader(lambda value: tuple(value.items()))),
    (torch.Generator, Reader(torch.Generator.initial_seed)),
    (BaseException, Reader(BaseException.args.__get__)),  # type: ignore[attr-defined]
)
_CONTEXT = Reader(_value_of_context, _set_context)
_GENERATOR = Reader(_place_of_generator)
_ITERATOR = Reader(_place_of_iterator)
_BUFFER = Reader(_bytes, _write_bytes)


def reader_of(value: Any) -> Reader | None:
    """How to read what an object hides from Python; None if it hides nothing that is known."""
    kind = type(value)
    for cls in kind.__mro__:
        if cls.__module__.startswith("numpy") and cls.__name__ in _NUMPY:
            return _NUMPY[cls.__name__]
    for hiding, reader in _HIDING:
        if isinstance_of(value, hiding):
            return reader
    if isinstance_of(value, weakref.ref):
        return _WEAK
    if kind in weakref.ProxyTypes:
        return _PROXY
    if kind is contextvars.ContextVar:
        return _CONTEXT
    if kind is types.GeneratorType:
        return _GENERATOR
    if hasattr(kind, "__next__") and not kind.__flags__ & _HEAP_TYPE:
        return _ITERATOR
    try:
        memoryview(value)
    except (TypeError, BufferError, ValueError):
        return None
    return _BUFFER


def behind_proxy(value: Any) -> Any:
    """What a proxy of `weakref` stands for; None if that is gone."""
    try:
        return value.__init__.__self__
    except (ReferenceError, AttributeError):
        return None


_WEAK = Reader(weakref.ref.__call__)
_PROXY = Reader(behind_proxy)


def isinstance_of(value: Any, cls: type) -> bool:
    """`isinstance` that asks the type alone, not an object that says to be of another class."""
    return cls in type(value).__mro__
