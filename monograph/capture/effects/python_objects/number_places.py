"""Where numbers can be put, and lists be replaced: an entry of a dict or list, an attribute, the variable of a closure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from monograph.capture.guards.sources.places import ClassEntries, Closure, Content, Entries, Slots, Source
from monograph.capture.guards.sources.values import ABSENT, is_immutable, same
from monograph.state.threads import alone


@dataclass(frozen=True)
class Place:
    """Where a number or a list is: `container[key]`. `home` is the object that a source of a build reads it from."""

    container: Any
    key: Any
    home: Any
    label: str
    owner: Any = None  # whose attribute it is, if other threads must not meet what is put there

    @property
    def value(self) -> Any:
        """What is there now; ABSENT if nothing is."""
        try:
            return self.container[self.key]
        except LookupError:
            return ABSENT


@dataclass(frozen=True)
class _OfClass:
    cls: type

    def __getitem__(self, name: str) -> Any:
        return self.cls.__dict__[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.cls, name, value)


@dataclass(frozen=True)
class _OfSlots:
    source: Slots

    def __getitem__(self, name: str) -> Any:
        try:
            return self.source.slots[name].__get__(self.source.owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.source.slots[name].__set__(self.source.owner, value)


@dataclass(frozen=True)
class _OfVariable:
    cell: Any

    def __getitem__(self, _key: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            raise KeyError("a variable without a value") from None

    def __setitem__(self, _key: str, value: Any) -> None:
        self.cell.cell_contents = value


@dataclass(frozen=True)
class _OfContent:
    """Entries of a dict or list of a class of its own, past its methods."""

    content: Any
    kind: Any

    def __getitem__(self, key: Any) -> Any:
        return self.kind.__getitem__(self.content, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.kind.__setitem__(self.content, key, value)


def place_in(source: Source, key: Any) -> Place | None:
    """The place of an entry of a source; None where nothing can be put."""
    label = source.item_label(key)
    match source:
        case ClassEntries():
            return Place(_OfClass(source.cls), key, source.entries, label)
        case Entries():
            return Place(source.entries, key, source.entries, label)
        case Slots():
            return Place(_OfSlots(source), key, source.owner, label)
        case Closure():
            return Place(_OfVariable(source.cell), key, source.cell, label)
        case Content(content=dict() as content) if key[1] == 1:
            name = list(dict.keys(content))[key[0]]
            if not is_immutable(name):
                return None
            table = content if type(content) is dict else _OfContent(content, dict)
            return Place(table, name, content, label)
        case Content(content=list() as content):
            items = content if type(content) is list else _OfContent(content, list)
            return Place(items, key, content, label)
    return None


def key_of(source: Source, place: Place) -> Any:
    """The key under which a source has a place; ABSENT if it has not."""
    match source:
        case Slots(owner=home) | Closure(cell=home):
            key = place.key
        case Content(content=dict() as home) if home is place.home:
            names = (at for at, name in source.recorded.items() if at[1] == 0 and same(place.key, name))
            at = next(names, None)
            key = ABSENT if at is None else (at[0], 1)
        case _:
            home, key = source.container(), place.key
    return key if home is place.home and key in source.recorded else ABSENT


def is_known(place: Place, sources: Iterable[Source]) -> bool:
    """True if one of these sources has a place."""
    return any(key_of(source, place) is not ABSENT for source in sources)


def unique(places: Iterable[Place]) -> list[Place]:
    """Each place once; beside other threads those alone that they do not meet."""
    found = list({(id(place.home), place.key): place for place in places}.values())
    if alone():
        return [replace(place, owner=None) for place in found]
    return [place for place in found if place.owner is not None]


def value_before(source: Source, place: Place) -> Any:
    """What a place held when the step began; ABSENT if it did not exist."""
    overwritten = source.overwritten if isinstance(source, Entries) else {}
    return source.recorded.get(key_of(source, place), overwritten.get(place.key, ABSENT))
