"""Objects that code had in its hands, and that were reached in no other way: a step may have made them itself.

What a step makes and forgets is no place that it reads or changes. Whether an object is forgotten is asked of the garbage
collector, which searches all memory: for instances of Python's own classes, and for what has changed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from monograph.capture.guards.sources.attributes import attributes_of, is_changeable
from monograph.capture.guards.sources.places import Entries, Source
from monograph.capture.guards.sources.reach.recorded import Recorded


class Handed:
    """Such objects, by their ids, and by the ids of the dicts of their attributes."""

    def __init__(self, recorded: Recorded, known: dict[int, Any]) -> None:
        """`known` is what was visited."""
        self._recorded, self._known = recorded, known
        self._dropped: list[Source] = []  # they still show the objects that they are in
        self.is_open = False  # while what code has in its hands is visited
        self._objects: dict[int, Any] = {}
        self._owners: dict[int, int] = {}  # by id of a dict of attributes the id of the object
        self._forgotten: set[int] = set()  # ids of objects of which it is known

    def note(self, value: Any) -> None:
        """An object that is seen for the first time, in the hands of code."""
        self._objects[id(value)] = value
        if (table := attributes_of(value)) is not None:
            self._owners[id(table)] = id(value)

    def drop(self, value: Any) -> None:
        """The object is reached in another way."""
        self._objects.pop(id(value), None)

    def owner(self, source: Source) -> int | None:
        """The id of the one of the objects that a source is in; None if it is elsewhere."""
        container = source.container()
        found = id(getattr(source, "owner", None) if container is None else container)
        owner = self._owners.get(found, found)
        return owner if owner in self._objects else None

    def is_forgotten(self, source: Source) -> bool:
        """True for a place in an object that the step has made, and that nobody has any more."""
        owner = self.owner(source)
        return owner is not None and owner in self._forgotten_of({owner})

    def drop_forgotten(self) -> None:
        """Take out the places in instances of Python's classes that the step has made and forgotten."""
        sources = self._recorded.sources
        owners = [self.owner(source) for source in sources]
        forgotten = self._forgotten_of(
            {owner for owner in owners if owner is not None and self._is_instance(owner)}
        )
        pairs = list(zip(sources, owners, strict=True))
        self._dropped += [source for source, owner in pairs if owner in forgotten]
        sources[:] = [source for source, owner in pairs if owner not in forgotten]

    def _own_records(self) -> list[Any]:
        """What refers to objects for this capture alone."""
        recorded = self._recorded
        return [self._known, recorded.growing, *_places_of([*recorded.sources, *self._dropped])]

    def _is_instance(self, owner: int) -> bool:
        """True if one of the objects, given by its id, is of a class written in Python."""
        return is_changeable(type(self._objects[owner]))

    def _forgotten_of(self, owners: set[int]) -> set[int]:
        """Those of some objects, given by their ids, that nobody has but others like them, and this capture for itself."""
        unknown = owners - self._forgotten
        if unknown:
            self._forgotten |= unknown - self._held(unknown)
        return owners & self._forgotten

    def _held(self, owners: set[int]) -> set[int]:
        """Those that somebody has. All are searched for together: each search is one through all memory."""
        layer: list[Any] = [self._objects[owner] for owner in owners]
        ours = {id(item) for item in (self._objects, *self._own_records())}
        has: dict[int, set[int]] = {}  # what is held, by who holds it
        held, passed = set[int](), set[int]()
        while layer:
            wanted = set(map(id, layer))
            passed |= wanted
            others: list[Any] = []
            for holder in gc.get_referrers(*layer):
                if holder is layer or id(holder) in ours or type(holder) is FrameType:
                    continue
                holds = wanted.intersection(map(id, gc.get_referents(holder)))
                if id(holder) in self._objects or self._owners.get(id(holder)) in self._objects:
                    has.setdefault(id(holder), set()).update(holds)
                    others.append(holder)
                else:
                    held |= holds
            layer = [holder for holder in others if id(holder) not in passed]
        pending = list(held)
        while pending:
            further = has.get(pending.pop(), set()) - held
            held |= further
            pending += further
        return held


def _places_of(sources: Iterable[Source]) -> Iterator[Any]:
    """What sources are made of, as the garbage collector finds it."""
    for source in sources:
        yield from (source, vars(source), source.recorded)
        if isinstance(source, Entries):
            yield source.overwritten
