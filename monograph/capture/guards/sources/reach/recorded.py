"""The places that were reached, with what was there, and the names of attributes and globals that count in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from monograph.capture.guards.sources.places import Entries, Source
from monograph.capture.guards.sources.values import ABSENT

Way = tuple[Source, Any]  # a place that holds an object, and the key there


class Visit(Protocol):
    """Follows an object, once."""

    def __call__(self, value: Any, label: str, way: Way | None = None) -> None:
        """`way` is the place that holds it, if that is known."""


class Recorded:
    """Sources with their content, which grows as names come to count. `follow` gets each new object."""

    def __init__(self, follow: Callable[[Any, str, Way], None]) -> None:
        self.sources: list[Source] = []
        self.names: set[str] = {"training", "build", "forward", "step", "__getattr__"}
        self.stored: set[str] = set()  # attributes that code gives values
        self.made_up: set[str] = set()  # names that no code spells where it asks for them
        self.growing: dict[int, Entries] = {}  # by id of the dict; whose entries with a name in `names` count
        self._follow = follow

    def add(self, source: Source) -> None:
        """A new source: record what is there, and follow it. Objects that share their dict have one source."""
        if isinstance(source, Entries) and source.names is self.names:
            if id(source.entries) in self.growing:
                return
            self.growing[id(source.entries)] = source
            self._note_overwritten(source, self.stored)
        self.sources.append(source)
        self._refill(source)

    def record(self, source: Source, key: Any, value: Any) -> None:
        """One entry of a source that is listed, unless it is known already."""
        if key not in source.recorded:
            source.recorded[key] = value
            if source.followed:
                self._follow(value, source.item_label(key), (source, key))

    def grow(self, names: Iterable[str]) -> None:
        """More names count."""
        new = set(names) - self.names
        if not new:
            return
        self.names |= new
        for source in list(self.growing.values()):
            entries = source.entries
            if not source.whole and not entries.keys().isdisjoint(new):
                for name in [name for name in new if name in entries and name not in source.excluded]:
                    self.record(source, name, entries[name])

    def count(self, source: Entries, name: Any) -> None:
        """One more name counts, in a source with names of its own."""
        source.names.add(name)
        if name in source.entries:
            self.record(source, name, source.entries[name])

    def make_up(self, names: Iterable[str]) -> None:
        """Names count that code makes of what it has."""
        found = set(names)
        self.made_up |= found
        self.grow(found)

    def will_store(self, names: Iterable[str]) -> None:
        """Code gives these attributes values: what was there is put back after the trace."""
        new = set(names) - self.stored
        if new:
            self.stored |= new
            for source in self.growing.values():
                self._note_overwritten(source, new)

    def leave_out(self, table: dict[str, Any], name: str) -> Entries | None:
        """An entry that the step does not read, or gives a value before: what was there does not count. Gives its source."""
        source = self.growing.get(id(table))
        if source is None or name not in source.names:
            return None
        source.excluded |= {name}
        source.recorded.pop(name, None)
        return source

    def is_whole(self, table: dict[str, Any]) -> bool:
        """True for a dict of attributes all of which count."""
        source = self.growing.get(id(table))
        return source is not None and source.whole

    def take_whole(self, table: dict[str, Any]) -> None:
        """All attributes in a dict count."""
        source = self.growing.get(id(table))
        if source is not None and not source.whole:
            self.make_whole(source)

    def make_whole(self, source: Entries) -> None:
        """All entries of a source count."""
        source.whole = True
        self._refill(source)
        now = list(source.now())  # the order counts
        source.recorded = {name: source.recorded[name] for name in now if name in source.recorded}

    def _refill(self, source: Source) -> None:
        for key, value in source.now().items():
            self.record(source, key, value)

    def _note_overwritten(self, source: Entries, names: Iterable[str]) -> None:
        for name in names:
            if name not in source.recorded:
                source.overwritten.setdefault(name, source.entries.get(name, ABSENT))
