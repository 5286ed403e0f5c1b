"""Plain numbers that a step finds in Python objects and leaves changed: counters, averages, dicts of counts.

As constants they would ask for a build at each step. So a step that is seen to change some is traced again, with numbers
that move (`capture/numbers/moving.py`) in their places: what it does with them is recorded, what Python decides on them is a
condition, and what they become is computed from them after each step. Whatever cannot be followed so stays a constant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from monograph.capture.effects.foreign_objects import Effects
from monograph.capture.effects.python_objects.number_places import Place, is_known, key_of
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.places import Content, Source
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.values import ABSENT, Moves, MovesInside
from monograph.capture.numbers.expressions import expression_of
from monograph.capture.numbers.moving import is_moving
from monograph.capture.numbers.taken import BOUND
from monograph.capture.tensors.fakes import Inputs
from monograph.ir.graph_signature import MOVES, Counted, ReadAfter, Write
from monograph.ir.port import Role

NUMBERS = (int, float)


class Uncounted(Exception):
    """A number is used in a way that cannot be followed: it stays a constant."""


@dataclass
class Counters:
    """The numbers that one trace finds as moving ones, in the places where all code looks for them."""

    places: Sequence[Place] = ()
    leaves: list[Any] = field(default_factory=list)
    _sources: list[Counted] = field(default_factory=list)  # where each leaf is
    _shown: list[Any] = field(
        default_factory=list
    )  # in each place: a leaf, or a list, tuple or dict of leaves
    _forms: list[Moves] = field(default_factory=list)
    _values: list[Any] = field(default_factory=list)
    _compared: str = ""  # the label of a place of which code asks which object is there
    _lists: list[tuple[list[Any], list[Any]]] = field(default_factory=list)  # those with places, and copies

    def put(self, inputs: Inputs, overlay: Overlay) -> None:
        """Put moving numbers there, until `remove()`."""
        homes = {id(place.home): place.home for place in self.places if isinstance(place.home, list)}
        self._lists = [(home, list(list.__iter__(home))) for home in homes.values()]
        for place in self.places:
            value = place.value
            if is_number(value):
                shown = self._leaf(inputs, place, None, value)
            elif MovesInside.of(value) is None:
                raise Uncounted(place.label)
            elif type(value) is dict:
                shown = {key: self._leaf(inputs, place, key, item) for key, item in value.items()}
            else:
                shown = type(value)([self._leaf(inputs, place, *item) for item in enumerate(value)])
            self._values.append(value)
            self._forms.append(MovesInside.of(value) or Moves(type(value)))
            self._shown.append(shown)
            self._show(place, shown, overlay)

    def _leaf(self, inputs: Inputs, place: Place, index: Any, value: float) -> Any:
        self.leaves.append(inputs.moving.leaf(f"counter_{len(self.leaves)}", value))
        self._sources.append(Counted(place.container, place.key, index))
        return self.leaves[-1]

    def compare(self, left: Any, right: Any) -> None:
        """Code asks by `is` whether two objects are one. ABSENT may be any, so that what looks like these counts."""
        for place, shown in zip(self.places, self._shown, strict=False):
            for one, other in ((left, right), (right, left)):
                if one is shown or (one is ABSENT and type(other) is type(shown)):
                    self._compared = place.label

    def known(self) -> set[tuple[int, Any]]:
        """Where numbers that move are: the ids of what holds them, and their keys there."""
        found = {(id(place.home), place.key) for place in self.places}
        for shown in self._shown:
            keys = shown if type(shown) is dict else range(len(shown)) if type(shown) is list else ()
            found |= {(id(shown), key) for key in keys}
        return found

    def remove(self) -> None:
        """Put back what was there. To be done whatever happens."""
        for live, before in self._lists:
            if len(live) != len(before):  # the step was stopped while it made the list shorter or longer
                list.__setitem__(live, slice(None), before)
        self._lists = []
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
        labels = {(id(place.container), place.key): place.label for place in self.places}
        for leaf, source in zip(self.leaves, self._sources, strict=True):
            label = labels[id(source.container), source.key]
            inputs.symbols[leaf.node.name] = len(inputs.items)
            inputs.add(
                leaf, Role.HYPER, label if source.index is None else f"{label}[{source.index!r}]", source
            )

    def collect(self, inputs: Inputs, overlay: Overlay) -> list[Write]:
        """What the step has made of them, which ends here: the places have the numbers of its beginning again."""
        writes = []
        for place, leaf in zip(self.places, self._shown, strict=True):
            value = overlay.present(place.home, place.key) if isinstance(place.home, dict) else place.value
            if is_moving(value) and is_moving(leaf) and value.node is leaf.node:
                continue
            if value is leaf and self._is_as_put(value):
                continue
            if not (is_number(value) and is_moving(leaf)):
                raise Uncounted(place.label)
            writes.append(self.written(inputs, place, value))
            self._show(place, leaf, overlay)
        return writes

    def _is_as_put(self, shown: Any) -> bool:
        """True for a list, tuple or dict of leaves that code has not changed."""
        items = list(shown.values() if type(shown) is dict else shown)
        put = [leaf for leaf in self.leaves if any(item is leaf for item in items)]
        return len(items) == len(put) and all(map(is_, items, put))

    def written(self, inputs: Inputs, place: Place, value: Any) -> Write:
        """A number that comes into a place with each step."""
        about = f"{place.label}{MOVES}"
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
        return (
            names
            | inputs.sizes()
            | {leaf.node.name: at for leaf, at in zip(self.leaves, self._sources, strict=True)}
        )

    def bind(self, names: Iterable[str]) -> set[str]:
        """The names of those that are inputs: `names` are read by the program, or by a condition."""
        kept = [leaf for leaf in self.leaves if leaf.node.name in set(names)]
        for leaf in kept:
            if leaf.node.pytype is int:
                if abs(leaf.node.value) > BOUND:
                    raise Uncounted(leaf.node.name)
                leaf.node.need(f"-{BOUND} <= {{}} <= {BOUND}")
        return {leaf.node.name for leaf in kept}

    def check(self, reach: Reach, effects: Effects, before: Effects, put: Iterable[Place]) -> None:
        """Raise Uncounted if the guards would not know each place, or if something beside them is lost by the way.

        `before` is what the trace without them has changed, `put` are other places that get numbers which move.
        """
        if self._compared:
            raise Uncounted(self._compared)
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

    def release(self, sources: Iterable[Source]) -> list[Source]:
        """Let the guards look at the types of these numbers alone; gives the sources that are left."""
        found = list(zip(self.places, self._forms, strict=True))
        own = set(map(id, self._shown))
        kept = [source for source in sources if id(source.container()) not in own]
        for source in kept:
            for place, form in found:
                if (key := key_of(source, place)) is not ABSENT:
                    source.recorded[key] = form
        return kept


def is_number(value: Any) -> bool:
    """True for an int or a float, also for one that moves."""
    return type(value) in NUMBERS or is_moving(value)


def holds_numbers(item: Any, depth: int = 4) -> bool:
    """True for a number that moves, and for containers with one."""
    if is_moving(item):
        return True
    if depth == 0 or not isinstance(item, (tuple, list, dict, set, frozenset, deque)):
        return False
    return any(
        holds_numbers(entry, depth - 1) for entry in (item.values() if isinstance(item, dict) else item)
    )
