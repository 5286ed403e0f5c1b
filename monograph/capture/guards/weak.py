"""What a step finds through weak references is the user's to let go: builds do not keep it alive.

Such an object is *loose*, and so is all that leads to it by strong references, up to the Graph and to modules, which outlive
a build anyway. A source in a loose object does not hold it but knows its place: a weak reference, or, for lists and dicts,
which have none, what refers to them. Values are recorded as marks: a weak reference, or the address of a list whose content
is looked at through its place. So an address that was given to another list is no danger: that list has to hold the same.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import lt
from types import MethodType, ModuleType
from typing import Any

from monograph.capture.guards.sources.attributes import attributes_of, isinstance_of, slots_of
from monograph.capture.guards.sources.hidden import held_in_array
from monograph.capture.guards.sources.places import Entries, Slots, Source
from monograph.capture.guards.sources.values import ABSENT, Mark, same

Finder = Callable[[], Any]  # gives an object, ABSENT if it is not there any more
_DATA = frozenset({"label", "recorded", "followed", "names", "whole", "excluded", "overwritten", "slots"})


@dataclass(frozen=True, eq=False)
class Weak(Mark):
    """Recorded in the place of an object that can be referred to weakly."""

    reference: weakref.ref[Any]

    def fits(self, value: Any) -> bool:
        return self.reference() is value

    def __repr__(self) -> str:
        found = self.reference()
        return "an object that is gone" if found is None else f"a {type(found).__name__}"


@dataclass(frozen=True, eq=False)
class At(Mark):
    """Recorded in the place of a list, a dict or the like: its type and its address."""

    kind: weakref.ref[type]
    address: int

    def fits(self, value: Any) -> bool:
        return id(value) == self.address and type(value) is self.kind()

    def __repr__(self) -> str:
        return "an object that is gone"


@dataclass(frozen=True, eq=False)
class Items(Mark):
    """Recorded in the place of a tuple."""

    kind: weakref.ref[type]
    items: tuple[Any, ...]

    def fits(self, value: Any) -> bool:
        if type(value) is not self.kind():
            return False
        found = _items_of(value)
        return len(found) == len(self.items) and all(map(same, self.items, found))

    def __repr__(self) -> str:
        return f"({', '.join(map(repr, self.items))})"


@dataclass(frozen=True, eq=False)
class Bound(Mark):
    """Recorded in the place of a method of an object: another one of the same function and object may be there."""

    function: Any
    owner: Any

    def fits(self, value: Any) -> bool:
        return (
            type(value) is MethodType
            and same(self.function, value.__func__)
            and same(self.owner, value.__self__)
        )

    def __repr__(self) -> str:
        return f"a method of {self.owner!r}"


@dataclass(eq=False)
class Loose(Source):
    """A source in an object that it does not keep alive."""

    inner: Source  # without that object
    places: Mapping[str, Finder]  # by field

    def present(self) -> Source | None:
        """The source with its object; None if that is gone."""
        found = {name: place() for name, place in self.places.items()}
        if any(value is ABSENT for value in found.values()):
            return None
        if isinstance(self.inner, Slots):
            found["slots"] = slots_of(type(found["owner"]))
        return replace(self.inner, recorded=self.recorded, **found)

    def now(self) -> Mapping[Any, Any]:
        found = self.present()
        return {} if found is None else found.now()


def present(sources: Iterable[Source]) -> Iterator[Source]:
    """Sources with the objects that they are in, without those whose object is gone."""
    for source in sources:
        found = source.present() if isinstance(source, Loose) else source
        if found is not None:
            yield found


def loosened(sources: Sequence[Source], weak: Iterable[Any], owner: Any) -> Sequence[Source]:
    """The sources of a step, so that they keep none of the `weak` objects alive. `owner` is the Graph."""
    found = {id(item) for item in weak}
    return _Loosening(sources, found, owner).sources() if found else sources


class _Loosening:
    """Which objects are loose, and how each of them is found without being held."""

    def __init__(self, sources: Sequence[Source], weak: set[int], owner: Any) -> None:
        self._sources = sources
        self._roots = {id(owner), id(attributes_of(owner))}
        self._seen: dict[int, Any] = {}
        self._parents: dict[int, list[int]] = {}  # by id of an object the ids of what refers to it
        self._look()
        self._loose = self._leading_to(weak)
        self._places: dict[int, Finder | None] = {}  # by id; None if there is none, or while it is looked for
        self._holders: dict[int, Source] = {}  # by id of a loose object: what holds it, and is not loose
        self._owners: dict[int, Any] = {}  # by id of the dict of its attributes
        for source in sources:
            held = objects_of(source).values()
            if not any(id(item) in self._loose for item in held):
                self._holders.update((id(value), source) for value in source.recorded.values())
            for item in held:
                if id(item) in self._loose and (table := attributes_of(item)) is not None:
                    self._owners[id(table)] = item

    def sources(self) -> list[Source]:
        """All sources, those in loose objects without holding them."""
        return list(map(self._loosened, self._sources))

    # --- what is loose -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Who refers to whom, in all that sources lead to."""
        pending = [item for source in self._sources for item in objects_of(source).values()]
        pending += [value for source in self._sources for value in source.recorded.values()]
        while pending:
            item = pending.pop()
            if id(item) not in self._seen and not self._is_root(item):
                self._seen[id(item)] = item
                for part in _parts(item):
                    self._parents.setdefault(id(part), []).append(id(item))
                    pending.append(part)

    def _is_root(self, item: Any) -> bool:
        """True for what outlives a build: the Graph, modules, and their globals."""
        is_globals = type(item) is dict and "__builtins__" in item
        return is_globals or id(item) in self._roots or isinstance_of(item, ModuleType)

    def _leading_to(self, weak: set[int]) -> set[int]:
        """The ids of these objects, and of all that leads to them."""
        loose, pending = set(weak), list(weak)
        while pending:
            for parent in self._parents.get(pending.pop(), ()):
                if parent not in loose:
                    loose.add(parent)
                    pending.append(parent)
        return loose

    # --- sources -------------------------------------------------------------------------------------------------------

    def _loosened(self, source: Source) -> Source:
        loose = {name: item for name, item in objects_of(source).items() if id(item) in self._loose}
        places = {name: self._place(item) for name, item in loose.items()}
        known = {name: place for name, place in places.items() if place is not None}
        if len(known) < len(places):
            return source
        marked = {key: self._marked(value) for key, value in source.recorded.items()}
        if not loose:
            source.recorded = marked
            return source
        without: dict[str, Any] = {"recorded": {}, **dict.fromkeys(loose)}
        if isinstance(source, Slots):
            without["slots"] = {}
        if isinstance(source, Entries):
            without["overwritten"] = dict.fromkeys(source.overwritten)
        inner = replace(source, **without)
        return Loose(source.label, inner, known, recorded=marked, followed=source.followed)

    def _marked(self, value: Any) -> Any:
        if id(value) not in self._loose:
            return value
        if isinstance_of(value, tuple):
            return Items(weakref.ref(type(value)), tuple(map(self._marked, _items_of(value))))
        if type(value) is MethodType:  # often made anew where it is asked for
            return Bound(self._marked(value.__func__), self._marked(value.__self__))
        return mark_for(value)

    def _place(self, item: Any) -> Finder | None:
        """How a loose object is found without being held; None if no way is known."""
        address = id(item)
        if address not in self._places:
            self._places[address] = None
            self._places[address] = next(self._ways(item, address), None)
        return self._places[address]

    def _ways(self, item: Any, address: int) -> Iterator[Finder]:
        if (reference := _reference_to(item)) is not None:
            yield partial(_referent, reference)
        if address in self._holders:
            yield partial(_recorded, self._holders[address], address)
        if address in self._owners and (place := self._place(self._owners[address])) is not None:
            yield partial(_attributes, place, address)
        for parent in self._parents.get(address, ()):
            if (place := self._place(self._seen[parent])) is not None:
                yield partial(_part, place, address)


class SharedObjects:
    """Such objects, with how many hold each. Where fewer hold one than before, somebody has let go of it."""

    def __init__(self, weak: Iterable[Any], bound: Collection[int] = ()) -> None:
        """`weak` are all that the step has found through weak references, `bound` the ids of state that a build holds."""
        weak = list(weak)
        self._weak = tuple(map(weakref.ref, weak))
        self.are_loose = bool(unbound(weak, bound))  # some must not be kept alive
        self.objects: list[Any] = []  # those that the build holds
        self.counted: list[Any] = []  # those of them that no other guard would miss
        self._counts: list[int] = []

    @property
    def are_known(self) -> bool:
        """True if the step found objects through weak references."""
        return bool(self._weak)

    def share(self, held: Iterable[Any], state: set[int]) -> None:
        """List what the build holds. `state` are ids of what other guards look at."""
        known = {id(reference()) for reference in self._weak}
        self.objects = list({id(item): item for item in held if id(item) in known}.values())
        self.counted = [item for item in self.objects if id(item) not in state]
        self._counts = list(map(sys.getrefcount, self.counted))

    def hold(self) -> bool:
        """True if nobody has let go of one."""
        return not any(map(lt, map(sys.getrefcount, self.counted), self._counts))


def unbound(weak: Iterable[Any], bound: Collection[int]) -> list[Any]:
    """Those of weakly known objects that a build does not hold anyway: `bound` are the ids of its state."""
    return [item for item in weak if id(item) not in bound]


def mark_for(value: Any) -> Mark:
    """What is recorded in the place of an object that is not to be kept alive."""
    reference = _reference_to(value)
    return At(weakref.ref(type(value)), id(value)) if reference is None else Weak(reference)


def objects_of(source: Source) -> dict[str, Any]:
    """By field the objects that a source is in."""
    names = [field.name for field in fields(source) if field.name not in _DATA]
    return {name: getattr(source, name) for name in names}


def _parts(item: Any) -> list[Any]:
    """What an object holds."""
    return gc.get_referents(item) if gc.is_tracked(item) else held_in_array(item)


def _items_of(value: Any) -> tuple[Any, ...]:
    """What a tuple holds, whatever class of tuples it is of."""
    return tuple(tuple.__iter__(value))


def _reference_to(value: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:  # lists, dicts and the like have none
        return None


# --- places ------------------------------------------------------------------------------------------------------------


def _referent(reference: weakref.ref[Any]) -> Any:
    found = reference()
    return ABSENT if found is None else found


def _recorded(source: Source, address: int) -> Any:
    return _at(address, source.now().values())


def _attributes(owner: Finder, address: int) -> Any:
    return _at(address, [attributes_of(owner())])


def _part(whole: Finder, address: int) -> Any:
    return _at(address, _parts(whole()))


def _at(address: int, items: Iterable[Any]) -> Any:
    return next((item for item in items if id(item) == address), ABSENT)
