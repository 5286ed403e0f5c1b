"""Plain numbers that a step finds in Python objects and leaves changed: counters, averages, dicts of counts.

As constants they would ask for a build at each step. So a step that is seen to change some is traced again, with numbers
that move (`moving.py`) in their places: what it does with them is recorded, what Python decides on them is a condition, and
what they become is computed from them after each step. Whatever cannot be followed so stays a constant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monograph.capture.effects.foreign_objects import Effects
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.places import ClassEntries, Closure, Content, Entries, Slots, Source
from monograph.capture.guards.sources.reach import Reach
from monograph.capture.guards.sources.values import ABSENT, Moves, is_immutable, same
from monograph.capture.numbers.expressions import expression_of
from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.fakes import Inputs
from monograph.ir.graph_signature import Counted, ReadAfter, Write
from monograph.ir.port import Role
from monograph.state.snapshot import alone

_KINDS = (int, float)
# for ints that enter a program: their sums are exact as floats, and in the 64 bits of its compiled form
_BOUND = 2**44


class Uncounted(Exception):
    """A number is used in a way that cannot be followed: it stays a constant."""


@dataclass(frozen=True)
class Place:
    """Where a number is: `container[key]`. `home` is the object that a source of a build reads it from."""

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
    """The place of an entry of a source; None where numbers cannot be put."""
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
            found = (at for at, name in enumerate(dict.keys(home)) if same(place.key, name))
            at = next(found, None)
            key = ABSENT if at is None else (at, 1)
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


def moved_numbers(sources: Iterable[Source]) -> Iterator[Place]:
    """Where numbers are that are other ones now than a build knows, and those that it takes as they come."""
    for source in sources:
        if any(map(_is_recorded_number, source.recorded.values())):
            now = source.now()
            for key, before in source.recorded.items():
                if _moved(before, now.get(key, ABSENT)) and (place := place_in(source, key)) is not None:
                    yield place


def _is_recorded_number(item: Any) -> bool:
    return type(item) is Moves or type(item) in _KINDS


def _moved(before: Any, now: Any) -> bool:
    if type(before) is Moves:
        return before.fits(now)
    return _is_recorded_number(before) and type(now) is type(before) and not same(before, now)


def changed_numbers(effects: Effects, attributes: Iterable[Place]) -> list[Place]:
    """The places where a trace has changed one number into another. `attributes` are those that an overlay shows."""
    found = list(attributes)
    for effect in effects.found:
        before, after = effect.before, effect.after
        if before.keys() == after.keys() and all(
            before[key] is after[key] for key in before if isinstance(key, tuple) and key[1] == 0
        ):
            keys = [
                key for key in before if key in effect.source.recorded and _counts(before[key], after[key])
            ]
            found += [place for key in keys if (place := place_in(effect.source, key)) is not None]
    return found


def _counts(before: Any, after: Any) -> bool:
    return type(before) in _KINDS and is_number(after) and not same(before, after)


def is_number(value: Any) -> bool:
    """True for an int or a float, also for one that moves."""
    return type(value) in _KINDS or is_moving(value)


@dataclass
class Counters:
    """The numbers that one trace finds as moving ones, in the places where all code looks for them."""

    places: Sequence[Place] = ()
    leaves: list[Any] = field(default_factory=list)
    _values: list[Any] = field(default_factory=list)
    _writes: list[Write] = field(default_factory=list)

    def put(self, inputs: Inputs, overlay: Overlay) -> None:
        """Put moving numbers there, until `remove()`."""
        for index, place in enumerate(self.places):
            value = place.value
            if not is_number(value):
                raise Uncounted(place.label)
            self._values.append(value)
            self.leaves.append(inputs.moving.leaf(f"counter_{index}", value))
            self._show(place, self.leaves[-1], overlay)

    def remove(self) -> None:
        """Put back what was there. To be done whatever happens."""
        for place, value in zip(self.places, self._values, strict=False):
            if place.owner is None:
                place.container[place.key] = value
        self._values = []

    @staticmethod
    def _show(place: Place, leaf: Any, overlay: Overlay) -> None:
        if place.owner is None:
            place.container[place.key] = leaf
        else:
            overlay.enter(place.owner)
        if isinstance(place.home, dict) and (seen := overlay.of(place.home)) is not place.home:
            seen[place.key] = leaf

    def add_to(self, inputs: Inputs) -> None:
        """Make them inputs of the program."""
        for place, leaf in zip(self.places, self.leaves, strict=True):
            inputs.symbols[leaf.node.name] = len(inputs.items)
            inputs.add(leaf, Role.HYPER, place.label, Counted(place.container, place.key))

    def collect(self, inputs: Inputs, overlay: Overlay) -> list[Write]:
        """What the step has made of them, which ends here: the places have the numbers of its beginning again."""
        writes = []
        for place, leaf in zip(self.places, self.leaves, strict=True):
            value = overlay.present(place.home, place.key) if isinstance(place.home, dict) else place.value
            if is_moving(value) and value.node is leaf.node:
                continue
            if not is_number(value):
                raise Uncounted(place.label)
            writes.append(self.written(inputs, place, value))
            self._show(place, leaf, overlay)
        return writes

    def written(self, inputs: Inputs, place: Place, value: Any) -> Write:
        """A number that comes into a place with each step."""
        about = f"{place.label} (a number that moves)"
        if not is_moving(value):
            return Write(place.container, place.key, value, about)
        expression = expression_of(value, self._names(inputs))
        if expression is None:
            raise Uncounted(place.label)
        return Write(place.container, place.key, expression, about, moves=True)

    def can_be_written(self, inputs: Inputs, value: Any) -> bool:
        """True for a number of this trace."""
        return value.node.moving is inputs.moving and expression_of(value, self._names(inputs)) is not None

    def _names(self, inputs: Inputs) -> dict[str, Any]:
        names: dict[str, Any] = {name: ReadAfter(name) for name in inputs.read_out} | inputs.symbols
        for known, leaf in zip(self.places, self.leaves, strict=True):
            names[leaf.node.name] = Counted(known.container, known.key)
        return names

    def bind(self, names: Iterable[str]) -> set[str]:
        """The names of those that are inputs: `names` are read by the program, or by a condition."""
        kept = [leaf for leaf in self.leaves if leaf.node.name in set(names)]
        for leaf in kept:
            if leaf.node.pytype is int:
                if abs(leaf.node.value) > _BOUND:
                    raise Uncounted(leaf.node.name)
                leaf.node.need(f"-{_BOUND} <= {{}} <= {_BOUND}")
        return {leaf.node.name for leaf in kept}

    def check(self, reach: Reach, effects: Effects, before: Effects, put: Iterable[Place]) -> None:
        """Raise Uncounted if the guards would not know each place, or if something beside them is lost by the way.

        `before` is what the trace without them has changed, `put` are other places that get numbers which move.
        """
        for place in self.places:
            if not is_known(place, reach.sources):
                raise Uncounted(place.label)
            if place.owner is not None and reach.may_read_dict(place.home, place.key):
                raise Uncounted(place.label)
        homes = {id(place.home) for place in (*self.places, *put)}
        for effect in effects.found:
            beside = isinstance(effect.source, Content) and id(effect.source.content) in homes
            if beside or not effect.repeatable or any(map(holds_numbers, effect.after.values())):
                raise Uncounted(effect.label)
        if lost := {*effects.lost, *effects.held} - {*before.lost, *before.held}:
            raise Uncounted(lost.pop())

    def release(self, sources: Iterable[Source]) -> None:
        """Let the guards look at the types of these numbers alone."""
        found = list(zip(self.places, self.leaves, strict=True))
        for source in sources:
            for place, leaf in found:
                if (key := key_of(source, place)) is not ABSENT:
                    source.recorded[key] = Moves(leaf.node.pytype)


def holds_numbers(item: Any, depth: int = 4) -> bool:
    """True for a number that moves, and for containers with one."""
    if is_moving(item):
        return True
    if depth == 0 or not isinstance(item, (tuple, list, dict, set, frozenset, deque)):
        return False
    return any(
        holds_numbers(entry, depth - 1) for entry in (item.values() if isinstance(item, dict) else item)
    )


def check_contents(sources: Iterable[Source], counters: Counters) -> None:
    """Raise Uncounted if a container, which is put back whole, has got a number that moves."""
    known = {(id(place.home), place.key) for place in counters.places}
    for source in sources:
        if isinstance(source, Content):
            for key, value in source.now().items():
                if not holds_numbers(value):
                    continue
                place = place_in(source, key)  # of a set or a deque none
                if place is None or not (is_moving(value) and (id(place.home), place.key) in known):
                    raise Uncounted(source.item_label(key))


def numbers_put(
    sources: Iterable[Source], overlay: Overlay, counters: Counters
) -> Iterator[tuple[Source, Place, Any]]:
    """Numbers that move, in places of objects that the graph does not hold, which had none that moves before."""
    known = {(id(place.home), place.key) for place in counters.places}
    for source in sources:
        if not source.followed or not isinstance(source, (Entries, Slots, Closure, Content)):
            continue
        if isinstance(source, Entries) and overlay.of(source.entries) is not source.entries:
            continue  # told apart by the overlay
        now = dict(source.now())
        if isinstance(source, Entries):
            now |= {name: source.entries[name] for name in source.overwritten if name in source.entries}
        for key, value in now.items():
            place = place_in(source, key) if is_moving(value) else None
            if place is None or (id(place.home), place.key) in known:
                continue
            if not isinstance(source, Content) or value_before(source, place) is not ABSENT:
                yield source, place, value


def value_before(source: Source, place: Place) -> Any:
    """What a place held when the step began; ABSENT if it did not exist."""
    overwritten = source.overwritten if isinstance(source, Entries) else {}
    return source.recorded.get(key_of(source, place), overwritten.get(place.key, ABSENT))
