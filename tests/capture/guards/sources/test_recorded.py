"""The parts of what code can reach, each by itself: recorded places, and functions whose results move unseen."""

from __future__ import annotations

import time
from typing import Any

from monograph.capture.guards.sources.code_names import names_of
from monograph.capture.guards.sources.places import Entries
from monograph.capture.guards.sources.reach.recorded import Recorded
from monograph.capture.guards.sources.reach.unguarded import unguarded_in
from monograph.capture.guards.sources.values import ABSENT


class Place:
    """A dict of attributes whose names count as code spells them, and what was followed from there."""

    def __init__(self, **entries: Any) -> None:
        self.entries, self.followed = entries, list[str]()
        self.recorded = Recorded(lambda _value, label, _way: self.followed.append(label))
        self.source = Entries("thing", self.entries, self.recorded.names)
        self.recorded.add(self.source)


def test_an_entry_is_recorded_once_its_name_counts():
    place = Place(depth=1, width=2)
    assert place.source.recorded == {}
    assert place.followed == []
    place.recorded.grow({"depth"})
    place.entries["depth"] = 3  # afterwards: what counts is what was there before
    place.recorded.grow({"depth", "height"})
    assert place.source.recorded == {"depth": 1}
    assert place.followed == ["thing.depth"]


def test_made_up_names_count_and_are_known_as_such():
    place = Place(depth=1)
    place.recorded.make_up(iter(["depth"]))
    assert place.recorded.made_up == {"depth"}
    assert place.source.recorded == {"depth": 1}


def test_a_whole_dict_is_recorded_in_its_order():
    place = Place(width=2, depth=1)
    place.recorded.grow({"depth"})
    place.recorded.take_whole(place.entries)
    assert place.recorded.is_whole(place.entries)
    assert not place.recorded.is_whole({})
    assert list(place.source.recorded.items()) == [("width", 2), ("depth", 1)]


def test_what_code_gives_values_is_noted_before():
    place = Place(depth=1)
    place.recorded.will_store({"depth", "new"})
    assert place.source.overwritten == {"depth": 1, "new": ABSENT}
    assert place.source.recorded == {}


def test_an_entry_that_is_left_out_never_counts():
    place = Place(depth=1)
    place.recorded.grow({"depth"})
    place.recorded.leave_out(place.entries, "depth")
    place.recorded.leave_out({}, "depth")  # of no source
    assert place.source.recorded == {}
    assert dict(place.source.now()) == {}


def _asks_the_time() -> float:
    before = 0.0
    return before + time.perf_counter()


def _asks_nothing() -> float:
    return float(time.timezone)


def test_the_first_line_that_asks_for_what_moves_unseen():
    code = _asks_the_time.__code__
    ((what, where),) = unguarded_in(code, globals(), names_of(code))
    assert (what, where.file, where.line) == ("the clock", __file__, code.co_firstlineno + 2)
    code = _asks_nothing.__code__
    assert list(unguarded_in(code, globals(), names_of(code))) == []
