"""Do the objects that a build depends on still hold what they held? A fast check, and a slow one that names what changed.

The fast check compares addresses and the version numbers that Python gives to dicts, at the words of memory where
Python keeps them (`words.py`). Where it fails, the slow one looks at what a step could have read: numbers and texts by
their exact type and value, everything else by identity, and all containers in their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn

from monograph.capture.guards.identities import identities
from monograph.capture.guards.reasons import (
    Order,
    cause_of,
    changed,
    elements_changed,
    entry_changed,
    hidden_changed,
)
from monograph.capture.guards.sources.attributes import attributes_of, isinstance_of
from monograph.capture.guards.sources.c_attributes import KeptByC
from monograph.capture.guards.sources.hidden import Probe
from monograph.capture.guards.sources.places import (
    Bases,
    Closure,
    Content,
    Entries,
    Function,
    Kind,
    Slots,
    Source,
    is_ordered,
)
from monograph.capture.guards.sources.values import ABSENT, Mark, Moves, is_immutable, same
from monograph.capture.guards.tensor_forms import WithoutGradients
from monograph.capture.guards.weak import Loose, present
from monograph.capture.guards.words import agree, place_of_length, place_of_version, places_of, words_reader
from monograph.compat.tensors import dict_version
from monograph.ir.call.reason import Reason, kind_of_change
from monograph.state.signals import held_back
from monograph.state.swap import Swap

_FORM = ("dtype", "device", "shape", "requires_grad")
_RESTLESS = 3  # changes of irrelevant entries after which a dict is no longer looked at by its version
_parts_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_content_of_cell = attrgetter("cell_contents")
_dict_of = attrgetter("__dict__")
_bases_of = type.__dict__["__mro__"].__get__


class ObjectGuards:
    """The places that a build depends on. `hold()` is the fast check, `changed()` names what differs.

    If it `covers_all`, nothing has changed as long as the words of memory at `places` are `words`.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._identities: bytes | None = None
        self._restless: Counter[int] = Counter()  # by id of the dict
        self._arrange()
        self.settle()
        if next(self._differences(), None) is not None:  # something has changed since it was recorded
            self._identities = None
        self.covers_all &= self._identities is not None

    def _arrange(self) -> None:
        """Sort the places by how they are looked at: by a word of memory where one is known, else by asking Python."""
        empty: list[Any] = []
        self._restless.update(
            {id(s.table()): _RESTLESS for s in self.sources if s.table() is not None and _moves(s)}
        )
        by_dict: dict[int, list[Source]] = {}
        self._looked_at = [(source, source.table()) for source in self.sources]
        self._tables: list[dict[Any, Any]] = []
        self._sequences: list[Any] = []  # of ordered dicts the keys
        self._others: list[Source] = []
        links: list[Source] = []
        for source in self.sources:
            table, container = source.table(), source.container()
            if container is not None and not container and not source.recorded:
                empty.append(container)
            elif table is not None:
                if id(table) not in by_dict and self._restless[id(table)] < _RESTLESS:
                    self._tables.append(table)
                by_dict.setdefault(id(table), []).append(source)
            elif isinstance(source, Loose) or _is_marked(source):
                self._others.append(source)
            elif isinstance(source, Content):
                self._sequences.append(source.content)
            else:
                is_link = isinstance(source, (Kind, Closure, Function, Bases, KeptByC))
                (links if is_link else self._others).append(source)
        self._ordered = [item for item in self._sequences if is_ordered(item)]
        for address, found in by_dict.items():
            if self._restless[address] >= _RESTLESS:
                self._others += found
        self._arrange_links(links)
        versions = [place_of_version(table) for table in self._tables]
        lengths = [place_of_length(container) for container in empty]
        self._dicts = [table for table, place in zip(self._tables, versions, strict=True) if place is None]
        self._empty = [container for container, place in zip(empty, lengths, strict=True) if place is None]
        self._all_empty, self._num_lengths = empty, len(empty) - len(self._empty)
        places = [*self._link_places, *versions, *lengths]
        self.places = [place for place in places if place is not None]
        self._read_words = words_reader(self.places)
        asked = (
            *(
                self._kinds,
                self._with_dict,
                self._with_plain_dict,
                self._cells,
                self._functions,
                self._classes,
            ),
            *(self._sequences, self._dicts, self._empty, self._others),
        )
        self._asks = any(asked)

    def _arrange_links(self, sources: Sequence[Source]) -> None:
        places = [places_of(source) for source in sources]
        pairs = list(zip(sources, places, strict=True))
        self._linked = [source for source, found in pairs if found is not None]
        self._link_places = [place for found in places for place in found or ()]
        others = [source for source, found in pairs if found is None]
        self._others += [source for source in others if isinstance(source, KeptByC)]
        self._kinds = [source.owner for source in others if isinstance(source, Kind)]
        with_dict = [source.owner for source in others if isinstance(source, Kind) and source.has_dict]
        self._with_dict = [owner for owner in with_dict if _finds_attributes_itself(owner)]
        self._with_plain_dict = [owner for owner in with_dict if not _finds_attributes_itself(owner)]
        self._cells = [source.cell for source in others if isinstance(source, Closure)]
        self._functions = [source.function for source in others if isinstance(source, Function)]
        self._classes = [source.cls for source in others if isinstance(source, Bases)]

    def settle(self) -> None:
        """Take the present objects as those that must be there."""
        if any(self._all_empty) or any(source.table() is not table for source, table in self._looked_at):
            self._arrange()  # some have entries that do not count, or other dicts have taken the places of these
        self.words = self._read_words()
        self._lengths = list(map(len, self._sequences))
        self._all_versions = list(map(dict_version, self._tables))
        self._versions = list(map(dict_version, self._dicts))
        targets = [value for source in self._linked for value in source.now().values()]
        gathered = self._gather()
        self._kept = gathered, targets  # alive, so that no address is given twice
        as_kept = agree(self.words, targets, self._num_lengths)
        self._identities = identities(gathered) if gathered is not None and as_kept else None
        self.covers_all = not self._asks and self._identities is not None

    def _gather(self) -> list[Any] | None:
        try:
            values: list[Any] = list(map(type, self._kinds))
            values.extend(map(_dict_of, self._with_plain_dict))
            values.extend(map(attributes_of, self._with_dict))
            values.extend(map(_content_of_cell, self._cells))
            values.extend(chain.from_iterable(map(_parts_of_function, self._functions)))
            values.extend(map(_bases_of, self._classes))
            values.extend(chain.from_iterable(self._sequences))
            values.extend(chain.from_iterable(map(OrderedDict.values, self._ordered)))
        except (ValueError, RuntimeError):  # a cell without a value, or a container that changes meanwhile
            return None
        return values

    def hold(self) -> bool:
        """True if nothing that a step could have read has changed."""
        if self._read_words() == self.words and self.rest_holds():
            return True
        if next(self._differences(), None) is not None:
            return False
        with held_back():  # half of it would fit no call any more
            self._note_restless()
            self.settle()
        return True

    def rest_holds(self) -> bool:
        """True if nothing has changed of what is not known by `words`."""
        return (
            (now := self._gather()) is not None
            and identities(now) == self._identities
            and list(map(dict_version, self._dicts)) == self._versions
            and list(map(len, self._sequences)) == self._lengths
            and not any(self._empty)
            and not any(map(_differs, self._others))
        )

    def _note_restless(self) -> None:
        """Dicts whose irrelevant entries change again and again are looked at entry by entry."""
        found = [
            id(table)
            for table, version in zip(self._tables, self._all_versions, strict=True)
            if dict_version(table) != version
        ]
        self._restless.update(found)
        if any(self._restless[item] == _RESTLESS for item in found):
            self._arrange()

    def changed(self) -> Iterator[Reason]:
        """What differs, as sentences."""
        return (_described(*found) for found in self._differences())

    def _differences(self) -> Iterator[tuple[Source, Any, Any, Any]]:
        for source in self.sources:
            yield from differences(source)

    def changed_but(self, swap: Swap) -> str | None:
        """The first difference that is not one of what has been replaced, as a sentence."""
        for found in self._differences():
            if swap.of(found[2]) is not found[3]:
                return _described(*found)
        return None

    def can_bind(self, swap: Swap) -> bool:
        """True if all that differs is what has been replaced, which is in no other place, and nothing was read in it."""
        replaced = {id(old) for old in swap.old if swap.of(old) is not old}
        for known_source in self.sources:
            source = known_source.present() if isinstance(known_source, Loose) else known_source
            if source is None:
                return False
            places = source.table(), source.container(), getattr(source, "owner", None)
            is_replaced = any(id(place) in replaced for place in places)
            if is_replaced and source is not known_source:
                return False
            if isinstance(source, Content) and id(source.content) in replaced:
                if not _is_swapped(source, swap):
                    return False
                continue
            if isinstance(source, Kind) and not source.has_dict and id(source.owner) in replaced:
                if type(source.owner) is not type(swap.of(source.owner)):
                    return False
                continue
            if is_replaced:
                return False
            known = [(key, value) for key, value in source.recorded.items() if id(value) in replaced]
            now = source.now() if known else {}
            if any(now.get(key, ABSENT) is not swap.of(value) for key, value in known):
                return False
        return self.changed_but(swap) is None

    def bind(self, swap: Swap) -> None:
        """Take what has been replaced as what must be there."""
        for source in self.sources:
            if isinstance(source, Content):
                source.content = swap.of(source.content)
            elif isinstance(source, Kind):
                source.owner = swap.of(source.owner)
            elif isinstance(source, WithoutGradients):
                source.parameters = {path: swap.of(item) for path, item in source.parameters.items()}
            for key, value in source.recorded.items():
                if id(value) in swap.new:
                    source.recorded[key] = swap.of(value)
        self._arrange()

    def values(self) -> Iterator[tuple[str, Any]]:
        """Attributes, globals and contents by label, without what belongs to libraries and to Python itself."""
        for source in present(self.sources):
            if source.followed and isinstance(source, (Entries, Slots, Closure, Content)):
                for key, value in source.recorded.items():
                    about_python = isinstance(key, str) and key[:2] == "__"
                    if not about_python and not (
                        isinstance(key, tuple) and key[1] == 0
                    ):  # the key of an entry
                        yield source.item_label(key), value


def _described(source: Source, key: Any, before: Any, after: Any) -> Reason:
    place = source.item_label(key)
    is_key = isinstance(source, Content) and isinstance(source.content, dict) and key[1] == 0
    text, cause = _text(source, key, before, after), cause_of(place, before, after, is_key=is_key)
    return Reason(text, cause, place, what=kind_of_change(before, after))


def _text(source: Source, key: Any, before: Any, after: Any) -> str:
    if before is after:
        return f"{source.label} changes at this very moment, in another thread"
    if isinstance(source, Probe) and not is_immutable(source.owner):
        return hidden_changed(source.label, before, after)
    if isinstance(before, Order):
        return changed(source.label, before, after)
    if isinstance(source, Content) and isinstance(source.content, dict):
        return entry_changed(source, key[0])
    if isinstance(source, Content) and (before is ABSENT or after is ABSENT):
        return elements_changed(source, before, after)
    return changed(source.item_label(key), before, after)


def _finds_attributes_itself(owner: Any) -> bool:
    """True if looking at `__dict__` would run code of the user's."""
    kind = type(owner)
    if isinstance_of(owner, nn.Module):
        return any("__getattribute__" in cls.__dict__ for cls in kind.__mro__[:-1])
    return any(
        name in cls.__dict__ for cls in kind.__mro__[:-1] for name in ("__getattribute__", "__getattr__")
    )


def _moves(source: Source) -> bool:
    """True if a number in it may be another one at each step."""
    return any(issubclass(type(value), Moves) for value in source.recorded.values())


def _is_marked(source: Source) -> bool:
    """True if something is recorded that is not the value itself."""
    return any(issubclass(type(value), Mark) for value in source.recorded.values())


def _differs(source: Source) -> bool:
    return next(differences(source), None) is not None


def differences(source: Source) -> Iterator[tuple[Source, Any, Any, Any]]:
    """The entries of a source that are no longer as recorded: the key, what was there, and what is there now."""
    if isinstance(source, Loose):
        found = source.present()
        if found is None:
            yield source, "", "an object", ABSENT
        else:
            yield from differences(found)
        return
    before = source.recorded
    try:
        now = source.now()
    except RuntimeError:  # another thread changes it at this very moment
        yield source, next(iter(before), ""), ABSENT, ABSENT
        return
    for key, value in before.items():
        present = now.get(key, ABSENT)
        if present is not value and not same(value, present):
            yield source, key, value, present
    if len(now) != len(before):
        for key in now:
            if key not in before:
                yield source, key, ABSENT, now[key]
    elif isinstance(source, Entries) and source.whole and list(now) != list(before):
        yield source, next(iter(now)), Order(tuple(before)), Order(tuple(now))


def _is_swapped(source: Content, swap: Swap) -> bool:
    """True if what has taken the place of a container holds the same, but for what has been replaced."""
    before, now = source.recorded, replace(source, content=swap.of(source.content)).now()
    return list(before) == list(now) and all(same(swap.of(before[key]), now[key]) for key in before)
