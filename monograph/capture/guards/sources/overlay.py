"""What the thread that captures sees in the attributes of objects, where all other threads see what is there.

A trace works on fakes, and build() may set attributes. Both go into a copy of an object's attributes that only
the capturing thread reads and writes: its reads of `module.weight`, `optimizer.state` or `vars(module)` pass methods
that are put on the classes for the duration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import nn

from monograph.compat.modules import MODULE_TABLES, NOT_SAVED
from monograph.state.threads import alone

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """Methods of a class that are replaced while a trace runs."""

    cls: type
    methods: dict[str, Any]
    own: dict[str, Any]  # those that the class itself defines

    def put_on(self) -> None:
        for name, method in self.methods.items():
            setattr(self.cls, name, method)

    def take_off(self) -> None:
        for name in self.methods:
            if name in self.own:
                setattr(self.cls, name, self.own[name])
            elif name in self.cls.__dict__:
                delattr(self.cls, name)


def put_on(stack: ExitStack, cls: type, patches: list[Patch], methods: dict[str, Any]) -> None:
    """Replace methods of a class until `stack` ends, and note that in `patches`."""
    own = {name: cls.__dict__[name] for name in methods if name in cls.__dict__}
    patch = Patch(cls, methods, own)
    try:
        patch.put_on()
    except TypeError:  # a class written in C: its attributes cannot be watched, nor set by most users
        return
    patches.append(patch)
    stack.callback(patch.take_off)
    stack.callback(patch.take_off)  # twice, as `replace` of compat/patching.py does


@contextmanager
def taken_off(patches: list[Patch]) -> Iterator[None]:
    """Inside, the classes are as they were."""
    for patch in reversed(patches):
        patch.take_off()
    try:
        yield
    finally:
        for patch in patches:
            patch.put_on()


def real_attributes_of(owner: Any) -> dict[str, Any] | None:
    """The attributes that are there under the overlay, for every thread; None for an object that keeps none."""
    try:
        found: Any = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class _View:
    """The attributes of one object: those that are there, what they were at first, and those that are seen."""

    owner: Any
    real: dict[str, Any]
    before: dict[str, Any]
    seen: dict[str, Any]

    def catch_up(self, name: str) -> None:
        """`object.__setattr__` goes past the overlay. With other threads about, it may have been one of theirs."""
        now = self.real.get(name, _ABSENT)
        if now is not self.before.get(name, _ABSENT) and alone():
            _put(self.before, name, now)
            _put(self.seen, name, now)

    def moved(self, name: str, change: Callable[[], object]) -> None:
        """Let `change` set or delete an attribute, where it is not known beforehand where that goes."""
        before = self.real.get(name, _ABSENT)
        change()
        now = self.real.get(name, _ABSENT)
        if now is not before:
            _put(self.real, name, before)
            _put(self.seen, name, now)


@dataclass
class Overlay:
    """The attributes that the thread which made it sees. Objects are looked after from `enter()` on.

    Those for which `covers(owner)` is true are entered when they are written to.
    """

    covers: Callable[[Any], bool] = lambda _owner: False
    _views: dict[int, _View] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)  # by id of what is there
    _there: dict[int, Any] = field(default_factory=dict)  # what is there, by id of what is seen
    _patches: list[Patch] = field(default_factory=list)
    _watched: set[type] = field(default_factory=set)
    _thread: int = field(default_factory=threading.get_ident)

    def enter(self, owner: Any) -> dict[str, Any] | None:
        """The attributes of an object as they are seen from now on; None if it keeps none."""
        if (view := self._views.get(id(owner))) is not None:
            return view.seen
        if (real := real_attributes_of(owner)) is None:
            return None
        before = dict(real)
        seen = {name: self.of(value) for name, value in before.items()}
        if isinstance(owner, nn.Module):
            for name, table in before.items():
                if name in (*MODULE_TABLES, NOT_SAVED) or is_hooks(name, table):
                    seen[name] = table.copy()
                    self.show(table, seen[name])
        self.show(real, seen)
        self._views[id(owner)] = _View(owner, real, before, seen)
        return seen

    def show(self, there: Any, seen: Any) -> None:
        """Let this thread find `seen` wherever an attribute holds the container `there`."""
        self._seen[id(there)], self._there[id(seen)] = seen, there

    def of(self, container: Any) -> Any:
        """What is seen in place of a dict of attributes, a table of a module, or a container that is there."""
        return self._seen.get(id(container), container)

    def there(self, container: Any) -> Any:
        """What is there where this thread sees `container`."""
        return self._there.get(id(container), container)

    def attributes(self, owner: Any) -> dict[str, Any]:
        """The attributes of an object as this thread has left them."""
        if (view := self._views.get(id(owner))) is not None:
            if not _same_entries(view.real, view.before):
                for name in view.real.keys() | view.before.keys():
                    view.catch_up(name)
            return view.seen
        return real_attributes_of(owner) or {}

    def present(self, there: dict[str, Any], name: str) -> Any:
        """An entry of a dict of attributes as this thread has left it; None if it is gone."""
        for view in self._views.values():
            if view.real is there:
                view.catch_up(name)
                return view.seen.get(name)
        return self.of(there).get(name)

    # --- on the classes --------------------------------------------------------------------------------------------

    def watch(self, stack: ExitStack, cls: type) -> None:
        """Let objects of a class and of its subclasses be seen so, until `stack` ends."""
        methods_of: Any = cls
        own_way = methods_of.__getattribute__ is not object.__getattribute__
        if own_way or any(base in self._watched for base in cls.__mro__):
            return
        self._watched.add(cls)
        methods = {
            "__getattribute__": self._getter(),
            "__setattr__": self._setter(methods_of.__setattr__),
            "__delattr__": self._deleter(methods_of.__delattr__),
        }
        if methods_of.__getstate__ is _STATE:
            methods["__getstate__"] = self._state_getter()
        put_on(stack, cls, self._patches, methods)
        stack.callback(self._watched.discard, cls)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show what this thread sees to all, and watch nothing: Dynamo cannot look through what watches."""
        there = [(view, dict(view.real)) for view in self._views.values()]
        for view, _ in there:
            _become(view.real, view.seen)
        try:
            with taken_off(self._patches):
                yield
        finally:
            for view, real in there:
                _become(view.seen, view.real)
                _become(view.real, real)

    def _getter(self) -> Callable[[Any, str], Any]:
        get, here, thread = object.__getattribute__, threading.get_ident, self._thread
        views, seen = self._views, self._seen
        descriptors: dict[tuple[type, str], bool] = {}

        def see(item: Any, name: str) -> Any:
            if here() != thread:
                return get(item, name)
            view = views.get(id(item))
            if name[:2] == "__" and name != "__dict__" and (view is None or name not in view.seen):
                return get(item, name)
            if name == "__dict__":
                found = view.seen if view is not None else self.enter(item) if self.covers(item) else None
                return get(item, name) if found is None else found
            if view is None:
                found = get(item, name)
                return seen.get(id(found), found)
            if view.real.get(name, _ABSENT) is not view.before.get(name, _ABSENT):
                view.catch_up(name)
            key = type(item), name
            if (by_class := descriptors.get(key)) is None:
                by_class = descriptors[key] = _is_data_descriptor(*key)
            if by_class:
                return get(item, name)
            if name in view.seen:
                found = view.seen[name]
                return seen.get(id(found), found)
            return _from_class(item, name) if name in view.real else get(item, name)

        return see

    def _setter(self, put: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
        def see(item: Any, name: str, value: Any) -> None:
            view = self._view_to_change(item, name)
            if view is None:
                put(item, name, value)
            elif put is object.__setattr__ or (put is _SET_IN_MODULE and not _registers(view, name, value)):
                view.seen[name] = value
            else:
                view.moved(name, lambda: put(item, name, value))

        return see

    def _deleter(self, delete: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
        def see(item: Any, name: str) -> None:
            view = self._view_to_change(item, name)
            if view is None:
                delete(item, name)
            elif name in view.seen:
                del view.seen[name]
            elif isinstance(item, nn.Module) and _registers(view, name, None):
                delete(item, name)
            else:
                raise AttributeError(f"{type(item).__name__!r} object has no attribute {name!r}")

        return see

    def _state_getter(self) -> Callable[[Any], Any]:
        def see(item: Any) -> Any:
            """What `copy` and `pickle` take, which do not ask for attributes."""
            view = self._views.get(id(item)) if threading.get_ident() == self._thread else None
            return _STATE(item) if view is None else dict(view.seen)

        return see

    def _view_to_change(self, item: Any, name: str) -> _View | None:
        if threading.get_ident() != self._thread or _is_data_descriptor(type(item), name):
            return None
        if id(item) not in self._views and (not self.covers(item) or self.enter(item) is None):
            return None
        return self._views[id(item)]


_SET_IN_MODULE = nn.Module.__setattr__
_STATE: Any = object.__getstate__


def _registers(view: _View, name: str, value: Any) -> bool:
    """True if a module keeps this in a table of its own, which is seen already."""
    kinds = (nn.Parameter, nn.Buffer, nn.Module)
    return isinstance(value, kinds) or any(name in view.seen.get(table, ()) for table in MODULE_TABLES)


def is_hooks(name: str, value: Any) -> bool:
    """True for the tables of a module that have its hooks, or say something of them."""
    return "_hooks" in name and isinstance(value, dict)


def _is_data_descriptor(cls: type, name: str) -> bool:
    found = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
    return hasattr(type(found), "__set__")


def _from_class(item: Any, name: str) -> Any:
    """An attribute as if the object itself did not have it: build() has deleted it."""
    for base in type(item).__mro__:
        if name in base.__dict__:
            found = base.__dict__[name]
            bind = getattr(type(found), "__get__", None)
            return found if bind is None else bind(found, item, type(item))
    raise AttributeError(f"{type(item).__name__!r} object has no attribute {name!r}")


def _same_entries(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two dicts have the same objects in the same order."""
    same = len(one) == len(other) and all(map(is_, one, other))
    return same and all(map(is_, one.values(), other.values()))


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def _become(table: dict[str, Any], other: dict[str, Any]) -> None:
    """Make a dict equal to another without ever emptying it: other threads may be reading."""
    table.update(other)
    for name in table.keys() - other.keys():
        del table[name]
