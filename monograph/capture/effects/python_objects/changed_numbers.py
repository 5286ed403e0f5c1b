"""Where numbers have changed: since a build was made, in a trace, and to numbers that move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from monograph.capture.effects.foreign_objects import Effects
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.effects.python_objects.counters import (
    NUMBERS,
    Counters,
    Uncounted,
    holds_numbers,
    is_number,
)
from monograph.capture.effects.python_objects.number_places import Place, place_in, value_before
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.places import Closure, Content, Entries, Slots, Source, has_other_keys
from monograph.capture.guards.sources.values import ABSENT, Moves, MovesInside, same
from monograph.capture.numbers.moving import is_moving


def moved_numbers(sources: Iterable[Source]) -> Iterator[Place]:
    """Where numbers are that are other ones now than a build knows, and those that it takes as they come."""
    for source in sources:
        if any(map(_is_recorded_number, source.recorded.values())):
            now = source.now()
            for key, before in source.recorded.items():
                if _moved(before, now.get(key, ABSENT)) and (place := place_in(source, key)) is not None:
                    yield place


def _is_recorded_number(item: Any) -> bool:
    return issubclass(type(item), Moves) or type(item) in NUMBERS or type(item) in (list, tuple, dict)


def _moved(before: Any, now: Any) -> bool:
    if type(now) in NUMBERS:  # an int may have become a float
        if issubclass(type(before), Moves) and before.kind in NUMBERS:
            return True
        if type(before) in NUMBERS:
            return not same(before, now)
    if issubclass(type(before), MovesInside):
        return bool(before.fits(now))
    return type(now) is type(before) and not same(before, now) and _replaced(before, now)


def _replaced(before: Any, now: Any) -> bool:
    """True for a list, tuple or dict of numbers in the place of another one like it."""
    form = MovesInside.of(before)
    return form is not None and form.fits(now)


def changed_numbers(effects: Effects, attributes: Iterable[Place]) -> list[Place]:
    """The places where a trace has changed one number into another. `attributes` are those that an overlay shows."""
    found = list(attributes)
    for effect in effects.found:
        before, after = effect.before, effect.after
        if not has_other_keys(before, after):
            keys = [
                key for key in before if key in effect.source.recorded and _counts(before[key], after[key])
            ]
            if keys and isinstance(
                effect.source.container(), list
            ):  # one that is moved along, say: others will follow
                keys += [key for key in before if key not in keys and _is_float(before[key], after[key])]
            found += [place for key in keys if (place := place_in(effect.source, key)) is not None]
    return found


def _is_float(before: Any, after: Any) -> bool:
    return type(before) is float and is_number(after)


def _counts(before: Any, after: Any) -> bool:
    return type(before) in NUMBERS and is_number(after) and not same(before, after)


def check_forms(sources: Iterable[Source], counters: Counters) -> None:
    """Raise Uncounted if a container with numbers that move has got other keys or another length."""
    homes = {id(place.home) for place in counters.places}
    for source in sources:
        if (
            isinstance(source, Content)
            and id(source.content) in homes
            and has_other_keys(source.recorded, source.now())
        ):
            raise Uncounted(source.label)


def check_contents(sources: Iterable[Source], counters: Counters, anew: Iterable[Source]) -> None:
    """Raise Uncounted if a container, which is put back whole, has got a number that moves.

    `anew` are those whose content each step makes: what counts there would be written twice.
    """
    homes = {id(place.home) for place in counters.places}
    if twice := next((source.label for source in anew if id(source.container()) in homes), ""):
        raise Uncounted(twice)
    known = counters.known()
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
    known = counters.known()
    for source in sources:
        if not source.followed or not isinstance(source, (Entries, Slots, Closure, Content)):
            continue
        if isinstance(source, Entries) and overlay.of(source.entries) is not source.entries:
            continue  # told apart by the overlay
        now = dict(source.now())
        if isinstance(source, Content) and _is_made_anew(source, now):
            continue  # with all that is in it
        if isinstance(source, Entries):
            now |= {name: source.entries[name] for name in source.overwritten if name in source.entries}
        for key, value in now.items():
            place = place_in(source, key) if is_moving(value) else None
            if place is None or (id(place.home), place.key) in known:
                continue
            if not isinstance(source, Content) or value_before(source, place) is not ABSENT:
                yield source, place, value


def _is_made_anew(source: Content, now: Mapping[Any, Any]) -> bool:
    """True if a container has got other keys, another length, or tensors of the step."""
    if has_other_keys(source.recorded, now):
        return True
    new = [value for key, value in now.items() if value is not source.recorded[key]]
    return any(holds_fakes(value, with_numbers=False) for value in new)
