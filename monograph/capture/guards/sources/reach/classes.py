"""Classes of the objects that were reached, with all their bases, and their subclasses where code asks for those."""

from __future__ import annotations

from typing import Any

from monograph.capture.guards.sources.attributes import class_table, is_changeable
from monograph.capture.guards.sources.libraries import is_library_module
from monograph.capture.guards.sources.places import Bases, ClassEntries, Kind, Subclasses
from monograph.capture.guards.sources.reach.c_parts import CParts
from monograph.capture.guards.sources.reach.recorded import Recorded
from monograph.capture.guards.sources.reach.weakly_held import WeaklyHeld


class Classes:
    """The classes that were reached. `known` is what was visited."""

    def __init__(self, recorded: Recorded, parts: CParts, weak: WeaklyHeld, known: dict[int, Any]) -> None:
        self._recorded, self._parts, self._weak, self._known = recorded, parts, weak, known
        self._taken: set[int] = set()  # ids
        self._own: list[type] = []  # of the user's, that code may ask for their subclasses
        self._asked: set[int] = set()  # ids of those whose subclasses count
        self._subclasses_count = False

    def take(self, cls: type) -> None:
        """A class with its bases."""
        if id(cls) in self._taken:
            return
        self._taken.add(id(cls))
        self._known[id(cls)] = cls
        if type(cls) is not type and is_changeable(type(cls)):
            self.take(type(cls))
        if is_changeable(cls):
            self._add(cls)
        for base in cls.__mro__[1:]:
            self.take(base)

    def _add(self, cls: type) -> None:
        label = cls.__qualname__
        self._recorded.add(Bases(label, cls))
        self._parts.take(cls, label)
        if is_changeable(type(cls)):
            self._recorded.add(Kind(label, cls, False, followed=False))
        own = not is_library_module(cls.__module__)
        names = self._recorded.names
        self._recorded.add(ClassEntries(label, class_table(cls), names, cls=cls, followed=own))
        if own:
            self._own.append(cls)
            if self._subclasses_count:
                self._take_subclasses(cls)

    def count_subclasses(self) -> None:
        """Code asks for the subclasses of some class."""
        self._subclasses_count = True
        for cls in self._own:
            self._take_subclasses(cls)

    def _take_subclasses(self, cls: type) -> None:
        """The classes made from one whose subclasses code asks for. It refers to them weakly."""
        if id(cls) not in self._asked:
            self._asked.add(id(cls))
            subclasses: list[type] = type.__subclasses__(cls)
            for found in subclasses:
                self._weak.note(found)
            self._recorded.add(Subclasses(cls.__qualname__, cls))
