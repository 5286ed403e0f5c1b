"""Where the lists are that a step only adds to: another list, or another dict of lists, may take their place between two steps.

It may not be one that the step reads, or adds to by another place: eager mode would mix what is added, or read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from monograph.capture.effects.python_objects.number_places import Place, place_in
from monograph.capture.guards.sources.places import Content, Source
from monograph.capture.guards.sources.values import Mark


@dataclass(frozen=True)
class _Inside:
    """The entries of the dict that is in a place."""

    place: Place

    def __getitem__(self, key: Any) -> Any:
        found = self.place.value
        if type(found) is not dict:
            raise KeyError(key)
        return found[key]


@dataclass(eq=False)
class _Whole(Source):
    """The dict that is in a place: what is in it may change, and the place does not show that."""

    place: Place

    def now(self) -> Mapping[Any, Any]:
        return {"": self.place.value}

    def table(self) -> dict[Any, Any] | None:
        found = self.place.value
        return found if type(found) is dict else None


@dataclass
class _Lists:
    """All that a list may not be which takes the place of another one."""

    places: dict[int, Place] = field(default_factory=dict)  # by the id of the list that was there at first
    contents: list[Content] = field(default_factory=list)

    def besides(self, known: Collection[int]) -> Iterator[Any]:
        """What the step reads, and what it adds to in other places than these."""
        yield from (place.value for first, place in self.places.items() if first not in known)
        yield from (source.content for source in self.contents)


@dataclass(frozen=True, eq=False)
class _AnyList(Mark):
    """Recorded in the place of a list."""

    lists: _Lists
    first: int

    def fits(self, value: Any) -> bool:
        return type(value) is list and not any(value is other for other in self.lists.besides({self.first}))

    def __repr__(self) -> str:
        return "a list of its own"


@dataclass(frozen=True, eq=False)
class _AnyDict(Mark):
    """Recorded in the place of a dict of lists: one with the same keys may be there."""

    lists: _Lists
    first: Mapping[str, int]  # the ids of the lists that were there at first

    def fits(self, value: Any) -> bool:
        if type(value) is not dict or not _are_names(value, self.first):
            return False
        others = [value, *self.lists.besides(set(self.first.values()))]
        taken = Counter(map(id, [*others, *value.values()]))
        return all(type(item) is list and taken[id(item)] == 1 for item in value.values())

    def __repr__(self) -> str:
        return "a dict of lists of its own"


def freed(sources: Sequence[Source], lists: Mapping[int, list[Any]]) -> tuple[list[Source], dict[int, Place]]:
    """The sources, so that other lists may be in the places of these; gives the places, by the ids of the lists.

    A list or dict stays what it is where several places lead to it.
    """
    found, gone, wholes = _Lists(), set[int](), list[Source]()
    dicts = {id(source.content): source for source in sources if _has_lists_alone(source, lists)}
    holders: dict[int, list[tuple[Source, Any]]] = {item: [] for item in (*lists, *dicts)}
    for source in sources:
        for key, value in source.recorded.items():
            if id(value) in holders:
                holders[id(value)].append((source, key))
    single = {item: held[0] for item, held in holders.items() if len(held) == 1}
    for item, whole in dicts.items():
        inside = {name: id(content) for name, content in whole.content.items()}
        place = place_in(*single[item]) if item in single and single.keys() >= set(inside.values()) else None
        if place is not None:
            source, key = single[item]
            source.recorded[key] = mark = _AnyDict(found, inside)
            wholes.append(_Whole(whole.label, place, recorded={"": mark}))
            gone.add(item)
            for name, content in inside.items():
                found.places[content] = Place(_Inside(place), name, None, whole.label)
    for item, (source, key) in single.items():
        is_list = item in lists and item not in found.places
        if is_list and (place := place_in(source, key)) is not None:
            source.recorded[key] = _AnyList(found, item)
            found.places[item] = place
    kept = [s for s in sources if not (isinstance(s, Content) and id(s.content) in gone)]
    found.contents = [source for source in kept if isinstance(source, Content)]
    return [*kept, *wholes], found.places


def _has_lists_alone(source: Source, lists: Mapping[int, list[Any]]) -> TypeGuard[Content]:
    """True for the content of a dict with names for such lists, and nothing else."""
    if not isinstance(source, Content) or type(source.content) is not dict or not source.content:
        return False
    return all(type(name) is str and id(item) in lists for name, item in source.content.items())


def _are_names(keys: Iterable[Any], names: Iterable[str]) -> bool:
    """True if these keys are the names, in their order."""
    found = list(keys)
    return all(type(key) is str for key in found) and found == list(names)
