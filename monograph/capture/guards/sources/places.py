"""Places that code can read from: each gives its present content as a mapping from a key to an object.

Looking at a place runs no code of the user's.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monograph.capture.guards.sources.attributes import attributes_of, put
from monograph.capture.guards.sources.values import ABSENT
from monograph.compat.modules import MODULE_TABLES
from monograph.ir.call.tree import dict_class

# what Python, dataclasses and pickling write into a class, also later on, and no step reads
_ABOUT_CLASSES = frozenset(
    {
        "__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__firstlineno__",
        "__static_attributes__", "__parameters__", "__orig_bases__", "__abstractmethods__", "__slotnames__",
        "__annotate__", "__annotate_func__", "__annotations_cache__", "__type_params__",
    }
)  # fmt: skip
_CACHE_OF_SUBCLASSES = "_abc_impl"  # of abstract classes: moves whenever `isinstance` is asked


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

    entries: dict[Any, Any]
    names: set[Any]  # shared with others, and growing while code runs
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

    def change(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        """Make what was `before` what it is `after`; where the keys are the same, entries that do not differ stay what they are now."""
        live = self.content
        if not isinstance(live, (dict, list, deque)) or has_other_keys(before, after):
            self.replace(after)
            return
        kind: Any = deque
        if is_dict := isinstance(live, dict):
            kind = dict_class(live)
        elif isinstance(live, list):
            kind = list
        for key, value in after.items():
            if value is not before[key]:
                kind.__setitem__(live, after[key[0], 0] if is_dict else key, value)

    def table(self) -> dict[Any, Any] | None:
        # an OrderedDict keeps its order outside of the dict
        return self.content if isinstance(self.content, dict) and not is_ordered(self.content) else None

    def container(self) -> Any:
        return self.content


def has_other_keys(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    """True if the content of a container has got other keys or another length."""
    return before.keys() != after.keys() or any(
        before[key] is not after[key] for key in before if isinstance(key, tuple) and key[1] == 0
    )


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
