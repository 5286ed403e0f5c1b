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
        return owner is not None and self._forgets(owner, self._own_records())

    def drop_forgotten(self) -> None:
        """Take out the places in instances of Python's classes that the step has made and forgotten."""
        sources = self._recorded.sources
        owners = [self.owner(source) for source in sources]
        instances = {owner for owner in owners if owner is not None and self._is_instance(owner)}
        ours = self._own_records() if instances else []
        forgotten = {owner for owner in instances if self._forgets(owner, ours)}
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

    def _forgets(self, owner: int, ours: Iterable[Any]) -> bool:
        """True if nobody but `ours`, what a capture keeps for itself, has the object of that id."""
        if owner not in self._forgotten and self._is_only_held_by(owner, ours):
            self._forgotten.add(owner)
        return owner in self._forgotten

    def _is_only_held_by(self, owner: int, ours: Iterable[Any]) -> bool:
        pending: list[Any] = [self._objects[owner]]
        passed = {id(item) for item in (pending, self._objects, *ours)}
        while pending:
            item = pending.pop()
            passed.add(id(item))
            for holder in gc.get_referrers(item):
                if id(holder) in passed or type(holder) is FrameType:
                    continue
                if id(holder) not in self._objects and self._owners.get(id(holder)) not in self._objects:
                    return False
                pending.append(holder)
        return True


def _places_of(sources: Iterable[Source]) -> Iterator[Any]:
    """What sources are made of, as the garbage collector finds it."""
    for source in sources:
        yield from (source, vars(source), source.recorded)
        if isinstance(source, Entries):
            yield source.overwritten
