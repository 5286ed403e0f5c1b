"""Whatever build() reads of objects is changed after the first call, in every way Python has; eager mode is the judge."""

from __future__ import annotations

import argparse
import array
import contextvars
import ctypes
import enum
import functools
import operator
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import asdict
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.capture.guards.sources.stale import CONFIG, Case, Cases, Config, check_change

CASES = Cases()
case = CASES.add


class Aliased:
    """Attributes under other names, as configurations of transformers have them."""

    attribute_map: ClassVar[dict[str, str]] = {"gain": "k"}

    def __init__(self) -> None:
        self.k = 2.0

    def __getattribute__(self, name: str) -> Any:
        if name != "attribute_map" and name in super().__getattribute__("attribute_map"):
            name = super().__getattribute__("attribute_map")[name]
        return super().__getattribute__(name)


class Extra:
    """Attributes in a dict of their own, as models of pydantic have them."""

    def __init__(self) -> None:
        object.__setattr__(self, "_extra", {"k": 2.0})

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_extra")[name]
        except KeyError:
            raise AttributeError(name) from None


class Slotted:
    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 2.0


class MoreSlots(Slotted):
    __slots__ = ("m",)


def reader_case(
    make_holder: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], Any]
) -> Callable[[], Case]:
    def make() -> Case:
        holder = make_holder()

        def build(self: Any, x: torch.Tensor) -> Any:
            return x * read(self.holder)

        return {"holder": holder}, build, lambda: change(holder)

    return make


def put(name: str, value: Any = 5.0) -> Callable[[Any], None]:
    return lambda holder: setattr(holder, name, value)


def entry(name: str, value: Any = 5.0) -> Callable[[Any], None]:
    return lambda holder: operator.setitem(holder, name, value)


def spread(**entries: Any) -> float:
    return float(entries["k"])


class Method:
    def __init__(self) -> None:
        self.k = 2.0

    def gain(self) -> float:
        return self.k

    def config(self) -> Config:
        return CONFIG

    @property
    def as_property(self) -> float:
        return self.k * 2

    @functools.cached_property
    def cached(self) -> float:
        return self.k * 3

    @classmethod
    def of_class(cls) -> float:
        return cls.level  # type: ignore[attr-defined,no-any-return]

    @staticmethod
    def of_static() -> float:
        return SCALE


SCALE = 2.0


class Descriptor:
    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


class WithDescriptor:
    gain = Descriptor(2.0)


class Number(float):
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Row(list):  # type: ignore[type-arg]
    pass


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Structure(ctypes.Structure):
    _fields_ = (("k", ctypes.c_double),)


def with_attribute(value: Any, k: float = 2.0) -> Any:
    value.k = k
    return value


def function_with_k() -> Any:
    def function(x: float) -> float:
        return x * 2.0

    return with_attribute(function)


def reset(colour: Colour) -> Colour:
    colour.weight = 2.0  # type: ignore[attr-defined]
    return colour


Pair = namedtuple("Pair", "k other")
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE")


def in_context(value: float) -> contextvars.ContextVar[float]:
    VARIABLE.set(value)
    return VARIABLE


def code_of(function: Any, other: Any) -> None:
    function.__code__ = other.__code__


def defaults_of(function: Any, value: tuple[Any, ...]) -> None:
    function.__defaults__ = value


def doubling(x: float = 2.0) -> float:
    return x * 2


class Nested:
    def __init__(self) -> None:
        self.inner = SimpleNamespace(deep=[{"k": 2.0}])


def fresh_class() -> Any:
    return type("Fresh", (), {"k": 2.0, "gain": lambda self: self.k})


def fresh_child() -> Any:
    parent = fresh_class()
    return type("Child", (parent,), {})


CASES |= {
    "vars()": reader_case(Config, lambda h: vars(h)["k"], put("k")),
    "__dict__": reader_case(Config, lambda h: h.__dict__["k"], put("k")),
    "__dict__ with a made name": reader_case(Config, lambda h: h.__dict__["".join(["", "k"])], put("k")),
    "__dict__ with a computed name": reader_case(Config, lambda h: h.__dict__[chr(107)], put("k")),
    "** of __dict__": reader_case(Config, lambda h: spread(**h.__dict__), put("k")),
    "object.__getattribute__": reader_case(Config, lambda h: object.__getattribute__(h, "k"), put("k")),
    "getattr of a made name": reader_case(Config, lambda h: getattr(h, chr(107)), put("k")),
    "operator.attrgetter": reader_case(Config, operator.attrgetter("k"), put("k")),
    "operator.attrgetter of a path": reader_case(
        Nested,
        lambda h: operator.attrgetter("inner.deep")(h)[0]["k"],
        lambda h: h.inner.deep[0].update(k=5.0),
    ),
    "map(getattr)": reader_case(Config, lambda h: next(map(getattr, [h], [chr(107)])), put("k")),
    "asdict": reader_case(Config, lambda h: asdict(h)["k"], put("k")),
    "a list in a dataclass": reader_case(Config, lambda h: sum(h.items), lambda h: h.items.append(4.0)),
    "an alias": reader_case(Aliased, lambda h: h.gain, put("k")),
    "extras": reader_case(Extra, lambda h: h.k, lambda h: h._extra.update(k=5.0)),
    "argparse": reader_case(lambda: argparse.Namespace(k=2.0), lambda h: h.k, put("k")),
    "argparse spread": reader_case(lambda: argparse.Namespace(k=2.0), lambda h: spread(**vars(h)), put("k")),
    "a slot": reader_case(Slotted, lambda h: h.k, put("k")),
    "an inherited slot": reader_case(MoreSlots, lambda h: h.k, put("k")),
    "a slot that was empty": reader_case(MoreSlots, lambda h: getattr(h, "m", 1.0), put("m")),
    "a bound method": reader_case(
        lambda: SimpleNamespace(f=Method().gain), lambda h: h.f(), lambda h: setattr(h.f.__self__, "k", 5.0)
    ),
    "a partial": reader_case(
        lambda: functools.partial(operator.mul, 2.0),
        lambda h: h(3.0),
        lambda h: h.__setstate__((h.func, (5.0,), {}, {})),
    ),
    "a partial of a list": reader_case(
        lambda: functools.partial(max, [2.0, 1.0]), lambda h: h(), lambda h: h.args[0].append(9.0)
    ),
    "a partial of a method": reader_case(
        lambda: functools.partial(Method().gain), lambda h: h(), lambda h: setattr(h.func.__self__, "k", 5.0)
    ),
    "what a method returns": reader_case(
        Method, lambda h: h.config().other, lambda h: setattr(CONFIG, "other", CONFIG.other + 1)
    ),
    "a property": reader_case(Method, lambda h: h.as_property, put("k")),
    "a property of the class replaced": reader_case(
        lambda: type("P", (Method,), {})(),
        lambda h: h.as_property,
        lambda h: setattr(type(h), "as_property", 9.0),
    ),
    "a weak reference": reader_case(
        lambda: (c := Config(), weakref.ref(c)), lambda h: h[1]().k, lambda h: setattr(h[0], "k", 5.0)
    ),
    "a class as config": reader_case(fresh_class, lambda h: h.k, put("k")),
    "vars of a class": reader_case(fresh_class, lambda h: vars(h)["k"], put("k")),
    "an attribute of the class": reader_case(
        lambda: fresh_class()(), lambda h: h.k, lambda h: setattr(type(h), "k", 5.0)
    ),
    "an attribute of a base class": reader_case(
        lambda: fresh_child()(), lambda h: h.k, lambda h: setattr(type(h).__bases__[0], "k", 5.0)
    ),
    "an attribute set on the nearer class": reader_case(
        lambda: fresh_child()(), lambda h: h.k, lambda h: setattr(type(h), "k", 5.0)
    ),
    "type(self).k": reader_case(
        lambda: fresh_class()(), lambda h: type(h).k, lambda h: setattr(type(h), "k", 5.0)
    ),
    "a method of the class": reader_case(
        lambda: fresh_class()(), lambda h: h.gain(), lambda h: setattr(type(h), "gain", lambda self: 9.0)
    ),
    "a method on the instance": reader_case(
        lambda: fresh_class()(), lambda h: h.gain(), put("gain", lambda: 9.0)
    ),
    "__class__": reader_case(
        lambda: fresh_class()(), lambda h: h.k, put("__class__", type("Other", (), {"k": 5.0}))
    ),
    "__bases__": reader_case(
        lambda: fresh_child()(),
        lambda h: h.k,
        lambda h: setattr(type(h), "__bases__", (type("Other", (), {"k": 5.0}),)),
    ),
    "a new __dict__": reader_case(Config, lambda h: h.k, put("__dict__", {"k": 5.0})),
    "a descriptor": reader_case(
        WithDescriptor,
        lambda h: h.gain,
        lambda h: setattr(
            WithDescriptor.__dict__["gain"], "value", WithDescriptor.__dict__["gain"].value + 1
        ),
    ),
    "an attribute of a float": reader_case(lambda: with_attribute(Number(3.0)), lambda h: h.k, put("k")),
    "an attribute of a dict": reader_case(lambda: with_attribute(Table(a=1)), lambda h: h.k, put("k")),
    "an attribute of a list": reader_case(lambda: with_attribute(Row([1])), lambda h: h.k, put("k")),
    "an entry of a dict with a class": reader_case(lambda: Table(k=2.0), lambda h: h["k"], entry("k")),
    "an item of a list with a class": reader_case(lambda: Row([2.0]), lambda h: h[0], entry(0)),
    "an attribute of a function": reader_case(function_with_k, lambda h: h.k, put("k")),
    "an attribute of an enum": reader_case(lambda: reset(Colour.RED), lambda h: h.weight, put("weight")),
    "code of a function": reader_case(
        function_with_k, lambda h: h(1.0), lambda h: code_of(h, lambda x: x * 7.0)
    ),
    "defaults of a function": reader_case(
        lambda: types.FunctionType(doubling.__code__, globals(), "d", (2.0,)),
        lambda h: h(),
        lambda h: defaults_of(h, (9.0,)),
    ),
    "a mutable default": reader_case(
        lambda: types.FunctionType((lambda k=None: k[0]).__code__, globals(), "d", ([2.0],)),
        lambda h: h(),
        lambda h: entry(0)(h.__defaults__[0]),
    ),
    "UserDict": reader_case(lambda: UserDict(k=2.0), lambda h: h["k"], entry("k")),
    "UserList": reader_case(lambda: UserList([2.0]), lambda h: h[0], entry(0)),
    "ChainMap": reader_case(
        lambda: ChainMap({}, {"k": 2.0}), lambda h: h["k"], lambda h: h.maps[1].update(k=5.0)
    ),
    "MappingProxyType": reader_case(
        lambda: (d := {"k": 2.0}, MappingProxyType(d)), lambda h: h[1]["k"], lambda h: h[0].update(k=5.0)
    ),
    "OrderedDict": reader_case(
        lambda: OrderedDict(a=1.0, b=2.0), lambda h: next(iter(h.values())), lambda h: h.move_to_end("a")
    ),
    "defaultdict": reader_case(lambda: defaultdict(float, k=2.0), lambda h: h["k"], entry("k")),
    "deque": reader_case(lambda: deque([1.0, 2.0]), lambda h: h[0], lambda h: h.rotate(1)),
    "a named tuple in a list": reader_case(
        lambda: [Pair(2.0, 3.0)], lambda h: h[0].k, entry(0, Pair(5.0, 3.0))
    ),
    "ctypes": reader_case(lambda: Structure(2.0), lambda h: h.k, put("k")),
    "a number of ctypes": reader_case(lambda: ctypes.c_double(2.0), lambda h: h.value, put("value")),
    "ContextVar": reader_case(lambda: in_context(2.0), lambda h: h.get(), lambda h: h.set(5.0)),
    "bytearray": reader_case(lambda: bytearray(b"ab"), lambda h: float(h[0]), entry(0, 7)),
    "array": reader_case(lambda: array.array("d", [2.0]), lambda h: h[0], entry(0)),
    "memoryview": reader_case(lambda: memoryview(bytearray(b"ab")), lambda h: float(h[0]), entry(0, 7)),
    "a numpy array": reader_case(lambda: np.array([2.0]), lambda h: float(h[0]), entry(0)),
    "a numpy array of objects": reader_case(
        lambda: np.array([2.0, "a"], dtype=object), lambda h: h[0], entry(0)
    ),
    "nested": reader_case(Nested, lambda h: h.inner.deep[0]["k"], lambda h: h.inner.deep[0].update(k=5.0)),
    "an attribute that appears": reader_case(Config, lambda h: getattr(h, "extra", 1.0), put("extra")),
    "an attribute that appears, by hasattr": reader_case(
        Config, lambda h: 3.0 if hasattr(h, "extra") else 1.0, put("extra")
    ),
    "an attribute that appears, by try": reader_case(Config, lambda h: _tried(h), put("extra")),
    "an attribute that goes": reader_case(lambda: Config(k=3.0), lambda h: h.k, lambda h: delattr(h, "k")),
    "a name in a format": reader_case(Config, lambda h: float("{.k}".format(h)), put("k")),  # noqa: UP032
    "match by class": reader_case(Config, lambda h: _matched(h), put("k")),
    "match by position": reader_case(Config, lambda h: _matched_by_position(h), put("k")),
    "a special method": reader_case(
        lambda: type("C", (), {"__len__": lambda s: 2})(),
        lambda h: float(len(h)),
        lambda h: setattr(type(h), "__len__", lambda s: 5),
    ),
    "a special method that appears": reader_case(
        lambda: type("C", (), {})(),
        lambda h: 2.0 if h else 3.0,
        lambda h: setattr(type(h), "__bool__", lambda s: False),
    ),
    "a metaclass": reader_case(
        lambda: type("Meta", (type,), {"k": 2.0})("C", (), {}),
        lambda h: h.k,
        lambda h: setattr(type(h), "k", 5.0),
    ),
    "an lru_cache": reader_case(
        lambda: functools.lru_cache(lambda: SCALE),
        lambda h: h(),
        lambda h: (h.cache_clear(), globals().update(SCALE=SCALE + 1)),
    ),
    "a module": reader_case(lambda: with_attribute(types.ModuleType("settings")), lambda h: h.k, put("k")),
    "a closure": reader_case(lambda: _counter(), lambda h: h[0](), lambda h: h[1](5.0)),
    "a list in a closure": reader_case(
        lambda: (lambda cell: (lambda: cell[0], cell))([2.0]), lambda h: h[0](), lambda h: entry(0)(h[1])
    ),
    "a static method that reads a global": reader_case(
        Method, lambda h: h.of_static(), lambda h: globals().update(SCALE=SCALE + 1)
    ),
    "a class method": reader_case(
        lambda: type("M", (Method,), {"level": 2.0}), lambda h: h.of_class(), put("level")
    ),
    "exec": reader_case(lambda: {"k": 2.0}, lambda h: eval("k * 2", h), lambda h: h.update(k=5.0)),
    "a generator expression over a dict": reader_case(
        lambda: {"a": 1.0}, lambda h: sum(v for v in h.values()), lambda h: h.update(b=2.0)
    ),
    "a key of a dict": reader_case(
        lambda: {2.0: 0}, lambda h: next(iter(h)), lambda h: (h.clear(), h.update({5.0: 0}))
    ),
    "an object as key": reader_case(
        lambda: {Aliased(): 0}, lambda h: next(iter(h)).k, lambda h: setattr(next(iter(h)), "k", 5.0)
    ),
    "two attributes swapped": reader_case(
        Config, lambda h: next(iter(vars(h).values())), lambda h: vars(h).update(k=vars(h).pop("k"))
    ),
}


def _tried(holder: Any) -> float:
    try:
        return holder.extra  # type: ignore[no-any-return]
    except AttributeError:
        return 1.0


def _matched(holder: Any) -> float:
    match holder:
        case Config(k=2.0):
            return 1.0
    return 3.0


def _matched_by_position(holder: Any) -> float:
    match holder:
        case Config(2.0):
            return 1.0
    return 3.0


def _counter() -> Any:
    value = 2.0

    def read() -> float:
        return value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    check_change(CASES[name](), more_builds=name == "an lru_cache")
