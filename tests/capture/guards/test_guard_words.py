"""Guards by words of memory, and by asking Python where the words are not known: both see the same changes."""

from __future__ import annotations

import pytest
import torch

from monograph.capture.guards import objects as object_guards
from monograph.capture.guards import owned as held_facts
from monograph.capture.guards import words
from monograph.capture.guards.objects import ObjectGuards
from monograph.capture.guards.owned import OwnedGuards
from monograph.capture.guards.sources.attributes import class_table
from monograph.capture.guards.sources.places import Bases, Closure, Content, Entries, Function, Kind
from monograph.compat.tensors import _read_pointers, pointer_guard
from monograph.state.find import Owned, RegisteredOptimizer


class Base:
    pass


class Thing(Base):
    def __init__(self):
        self.depth = 1


class Slotted:
    __slots__ = ("__dict__",)


def closing(value):
    def read(first=1, *, second=2):
        return value, first, second

    return read


class Places:
    """One object of each kind that guards look at, as capture records it."""

    def __init__(self):
        self.thing, self.slotted, self.bare = Thing(), Slotted(), Thing()
        self.bare.__dict__.clear()
        self.function = closing(self.thing)
        self.cls = type("Own", (Base,), {})
        self.containers = {kind: kind() for kind in (dict, list, set)}
        self.full = {"a": self.thing}
        names = {"depth", "x"}
        sources = [
            Kind("thing", self.thing, True),
            Kind("slotted", self.slotted, True),
            Entries("thing", self.thing.__dict__, names),
            Entries("bare", self.bare.__dict__, names),
            Function("function", self.function),
            Closure("cell", self.function.__closure__[0]),
            Bases("cls", self.cls),
            Entries("cls", class_table(self.cls), names),
            Content("full", self.full),
            *(Content("empty", container) for container in self.containers.values()),
        ]
        for source in sources:
            source.recorded = dict(source.now())
        self.guards = ObjectGuards(sources)


CHANGES = {
    "class": lambda p: setattr(p.thing, "__class__", Base),
    "dict": lambda p: setattr(p.thing, "__dict__", {"depth": 1}),
    "dict with slots": lambda p: setattr(p.slotted, "__dict__", {}),
    "attribute": lambda p: setattr(p.thing, "depth", 2),
    "attribute of the same value": lambda p: setattr(p.thing, "depth", True),
    "first attribute": lambda p: setattr(p.bare, "x", 2),
    "code": lambda p: setattr(p.function, "__code__", closing(0).__code__.replace(co_name="other")),
    "defaults": lambda p: setattr(p.function, "__defaults__", (2,)),
    "no defaults": lambda p: setattr(p.function, "__defaults__", None),
    "keyword defaults": lambda p: setattr(p.function, "__kwdefaults__", {"second": 3}),
    "cell": lambda p: setattr(p.function.__closure__[0], "cell_contents", None),
    "empty cell": lambda p: delattr(p.function.__closure__[0], "cell_contents"),
    "bases": lambda p: setattr(p.cls, "__bases__", (Thing,)),
    "attribute of a class": lambda p: setattr(p.cls, "x", 1),
    "entry": lambda p: p.full.update(b=1),
    "entry replaced": lambda p: p.full.update(a=Thing()),
    "dict filled": lambda p: p.containers[dict].update(a=1),
    "list filled": lambda p: p.containers[list].append(1),
    "set filled": lambda p: p.containers[set].add(1),
}


@pytest.fixture(params=["words", "python"])
def places(request, monkeypatch):
    if request.param == "python":
        for name in ("place_of_version", "place_of_length", "places_of"):
            monkeypatch.setattr(object_guards, name, lambda _item: None)
    elif words._VERSION is None:
        pytest.skip("this Python keeps versions elsewhere")
    return Places()


@pytest.mark.every_case
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_and_named(places, change):
    assert places.guards.hold()
    change(places)
    assert not places.guards.hold()
    assert places.guards.changed() is not None
    assert not places.guards.hold()


def test_entries_that_do_not_count_change_nothing(places):
    for number in range(6):
        places.thing.other = number
        places.bare.other = number
        assert places.guards.hold()
    places.thing.other = 7
    places.thing.depth = 2
    assert not places.guards.hold()


def test_an_entry_that_counts_takes_the_place_of_one_that_does_not(places):
    places.bare.other = 1
    assert places.guards.hold()
    del places.bare.other
    places.bare.x = 1
    assert not places.guards.hold()


def test_a_value_that_is_put_back_is_the_same_fact(places):
    before = places.thing.depth
    places.thing.depth = 5
    assert not places.guards.hold()
    places.thing.depth = before
    assert places.guards.hold()


# --- tensors -------------------------------------------------------------------------------------------------------------


def _resize(tensors):
    tensors[3].resize_(2)


MOVES = {
    "data": lambda tensors: setattr(tensors[0], "data", tensors[0].data.clone()),
    "set_": lambda tensors: tensors[1].set_(torch.ones(2)),
    "storage": lambda tensors: tensors[1].untyped_storage().resize_(0),
    "swapped": lambda tensors: torch.utils.swap_tensors(tensors[1], tensors[2]),
    "from nothing": _resize,
}


@pytest.fixture(params=["in one call", "one by one"])
def tensors(request, monkeypatch):
    if request.param == "one by one":
        monkeypatch.setattr("monograph.compat.tensors.calls_of_each", lambda _function, _objects: None)
    return [torch.nn.Parameter(torch.ones(2)), torch.ones(2), torch.zeros(2), torch.empty(0)]


@pytest.mark.every_case
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_memory_that_moves_is_seen(tensors, move):
    read, known = pointer_guard(tensors)
    assert read() == known
    read_none, nothing = pointer_guard([])
    assert read_none() == nothing
    move(tensors)
    assert read() != known
    read, known = pointer_guard(tensors)
    assert read() == known


def test_the_one_call_is_what_guards_use():
    """Without it guards still hold; this is where the time would go, were numpy or torch to change."""
    assert _read_pointers([torch.ones(1)]) is not None


# --- state of optimizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_state_put_into_other_dicts_is_the_same_state(known, monkeypatch):
    if not known:
        monkeypatch.setattr(held_facts, "place_of_version", lambda _table: None)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    facts = OwnedGuards(Owned(None, optimizers=(RegisteredOptimizer("main", optimizer),)), (), {})
    assert facts.hold()
    for _ in range(5):
        optimizer.state[weight] = dict(optimizer.state[weight])
        assert facts.hold()
    optimizer.state = dict(optimizer.state)
    assert facts.hold()
    before = optimizer.state[weight]["exp_avg"]
    optimizer.state[weight]["exp_avg"] = before.clone()
    assert not facts.hold()
    optimizer.state[weight]["exp_avg"] = before
    assert facts.hold()
    optimizer.param_groups[0]["weight_decay"] = "none"
    assert not facts.hold()
