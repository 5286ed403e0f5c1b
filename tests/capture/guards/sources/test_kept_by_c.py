"""What objects keep outside of any dict of Python's, and what code finds by names that it makes up: a change is seen."""

from __future__ import annotations

import array
import csv
import ctypes
import decimal
import inspect
import io
import itertools
import logging
import os
import random
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import monograph as mg

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
Case = tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object]]


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda owner: setattr(owner, name, value)


def _function(a: float = 2.0, *, b: float = 3.0) -> float:
    """2"""
    return a + b


def function() -> Any:
    made = types.FunctionType(_function.__code__, globals(), "made", (2.0,))
    made.__kwdefaults__ = {"b": 3.0}
    made.__doc__, made.k = "2", 2.0  # type: ignore[attr-defined]
    return made


def made_class(**entries: Any) -> Any:
    return type("Made", (), entries)


def closure() -> Any:
    cell = 2.0
    return lambda: cell


def written(kind: Any, text: Any) -> Callable[[Any], object]:
    return lambda owner: (owner.seek(0), owner.write(text))


def described(name: str) -> float:
    return float(sum(map(ord, name)))


def at(index: int, value: Any = 5.0) -> Callable[[Any], object]:
    return lambda owner: owner.__setitem__(index, value)


FIRST, SECOND = type("First", (type,), {"k": 2.0}), type("Second", (type,), {"k": 5.0})
CASES: dict[str, Case] = {
    "the name of a class": (made_class, lambda h: described(h.__name__), put("__name__", "Longer")),
    "the name of the class of an object": (
        lambda: made_class()(),
        lambda h: described(type(h).__name__),
        lambda h: setattr(type(h), "__name__", "Longer"),
    ),
    "the full name of a class": (
        made_class,
        lambda h: described(h.__qualname__),
        put("__qualname__", "Longer"),
    ),
    "the class of a class": (lambda: FIRST("C", (), {}), lambda h: h.k, put("__class__", SECOND)),
    "the name of a function": (function, lambda h: described(h.__name__), put("__name__", "longer")),
    "the full name of a function": (
        function,
        lambda h: described(h.__qualname__),
        put("__qualname__", "longer"),
    ),
    "the text about a function": (function, lambda h: float(h.__doc__), put("__doc__", "5")),
    "defaults that are read": (function, lambda h: float(h.__defaults__[0]), put("__defaults__", (5.0,))),
    "named defaults that are read": (
        function,
        lambda h: float(h.__kwdefaults__["b"]),
        lambda h: h.__kwdefaults__.update(b=5.0),
    ),
    "a signature": (
        function,
        lambda h: float(inspect.signature(h).parameters["a"].default),
        put("__defaults__", (5.0,)),
    ),
    "code that is read": (
        function,
        lambda h: float(h.__code__.co_argcount),
        put("__code__", (lambda: 1).__code__),
    ),
    "another dict of a function": (function, lambda h: float(h.k), put("__dict__", {"k": 5.0})),
    "a variable of a function that is read": (
        closure,
        lambda h: float(h.__closure__[0].cell_contents),
        lambda h: setattr(h.__closure__[0], "cell_contents", 5.0),
    ),
    "a cell": (lambda: types.CellType(2.0), lambda h: float(h.cell_contents), put("cell_contents", 5.0)),
    "what an error is about": (lambda: ValueError(2.0), lambda h: float(h.args[0]), put("args", (5.0,))),
    "the text of an error": (lambda: ValueError("2"), lambda h: float(str(h)), put("args", ("5",))),
    "the cause of an error": (
        lambda: ValueError(2.0),
        lambda h: 2.0 if h.__cause__ is None else 3.0,
        put("__cause__", KeyError()),
    ),
    "the number of an error": (lambda: OSError(2, "x"), lambda h: float(h.errno), put("errno", 5)),
    "the factory of a dict": (
        lambda: defaultdict(lambda: 2.0),
        lambda h: (h["q"], h.clear())[0],
        put("default_factory", lambda: 5.0),
    ),
    "a dict in an array": (
        lambda: np.array([{"k": 2.0}, None], dtype=object),
        lambda h: float(h[0]["k"]),
        lambda h: h[0].update(k=5.0),
    ),
    "an object where one was in an array": (
        lambda: np.array([float("2.0"), None], dtype=object),
        lambda h: float(h[0]),
        lambda h: (h.__setitem__(0, None), h.__setitem__(0, float("5.0"))),
    ),
    "a list in a record": (
        lambda: np.array([(1, [2.0])], dtype=[("a", int), ("b", object)]),
        lambda h: float(h["b"][0][0]),
        lambda h: h["b"][0].__setitem__(0, 5.0),
    ),
    "what an iterator repeats": (
        lambda: itertools.repeat([2.0]),
        lambda h: float(next(h)[0]),
        lambda h: next(h).__setitem__(0, 5.0),
    ),
    "what a pointer points to": (
        lambda: ctypes.pointer(ctypes.c_double(2.0)),
        lambda h: float(h.contents.value),
        lambda h: setattr(h.contents, "value", 5.0),
    ),
    "an object that C holds": (lambda: ctypes.py_object([2.0]), lambda h: float(h.value[0]), lambda h: at(0)(h.value)),
    "a text in memory": (lambda: io.StringIO("2"), lambda h: float(h.getvalue()), written(io.StringIO, "5")),
    "bytes in memory": (lambda: io.BytesIO(b"2"), lambda h: float(h.getvalue()), written(io.BytesIO, b"5")),
    "the digits of a context": (
        lambda: decimal.Context(prec=5),
        lambda h: float(h.divide(decimal.Decimal(1), decimal.Decimal(3))),
        put("prec", 3),
    ),
    "the seed of a generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda h: float(h.initial_seed()),
        lambda h: h.manual_seed(5),
    ),
    "the level of a logger": (
        lambda: (made := logging.getLogger("of a test"), made.setLevel(logging.INFO))[0],
        lambda h: 2.0 if h.isEnabledFor(logging.DEBUG) else 3.0,
        lambda h: h.setLevel(logging.DEBUG),
    ),
    "the class of a module": (
        lambda: types.ModuleType("settings"),
        lambda h: float(getattr(h, "k", 2.0)),
        put("__class__", type("Settings", (types.ModuleType,), {"k": 5.0})),
    ),
    "what a module has instead of a name": (
        lambda: types.ModuleType("settings"),
        lambda h: float(getattr(h, "k", 2.0)),
        put("__getattr__", lambda _name: 5.0),
    ),
    "an attribute of a tensor": (
        lambda: (made := torch.ones(3), setattr(made, "k", 2.0))[0],
        lambda h: float(h.k),
        put("k", 5.0),
    ),
    "another dict of a tensor": (
        lambda: (made := torch.ones(3), setattr(made, "k", 2.0))[0],
        lambda h: float(h.k),
        put("__dict__", {"k": 5.0}),
    ),
    "a made-up name on the class": (
        lambda: made_class(k=2.0)(),
        lambda h: float(getattr(h, chr(107))),
        lambda h: setattr(type(h), "k", 5.0),
    ),
    "a made-up name on a base class": (
        lambda: type("Child", (made_class(k=2.0),), {})(),
        lambda h: float(getattr(h, chr(107))),
        lambda h: setattr(type(h).__bases__[0], "k", 5.0),
    ),
    "a made-up name on the class of a class": (
        lambda: type("Meta", (type,), {"k": 2.0})("C", (), {}),
        lambda h: float(getattr(h, chr(107))),
        lambda h: setattr(type(h), "k", 5.0),
    ),
    "all names of an object": (
        lambda: made_class()(),
        lambda h: float(len([name for name in dir(h) if name[:1] != "_"])),
        lambda h: setattr(type(h), "k", 5.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    make, read, change = CASES[name]
    holder = make()
    graph = type("Step", (mg.Graph,), {"build": lambda self, x: x * read(self.h)})()
    graph.h = holder
    for call in range(4):
        if call == 2:
            before = read(holder)
            change(holder)
            assert before != read(holder), "the case changes nothing"
        assert torch.equal(X * read(holder), graph(X)), call
    assert len(graph.builds) == 2, [build.reason for build in graph.builds]


def add_to_bytes(self: Any, x: torch.Tensor) -> Any:
    self.box.append(3)
    return x * len(self.box)


def write_a_text(self: Any, x: torch.Tensor) -> Any:
    self.box.write("a")
    return x * len(self.box.getvalue())


def draw_bits(self: Any, x: torch.Tensor) -> Any:
    return x * float(self.box.random_raw() % 7)


def spawn(self: Any, x: torch.Tensor) -> Any:
    return x * (self.box.n_children_spawned + len(self.box.spawn(1)))


MOVING: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "bytes": (add_to_bytes, lambda: bytearray(b"a")),
    "an array": (add_to_bytes, lambda: array.array("d", [1.0])),
    "a text in memory": (write_a_text, io.StringIO),
    "bits": (draw_bits, lambda: np.random.PCG64(3)),
    "seeds": (spawn, lambda: np.random.SeedSequence(3)),
}


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_moves_as_in_eager_mode(name: str) -> None:
    build, make = MOVING[name]
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), type("Plain", (), {"build": build})()
    graph.box, plain.box = make(), make()
    for call in range(5):
        assert torch.equal(plain.build(X), graph(X)), call


def entries() -> Iterator[os.DirEntry[str]]:
    return os.scandir(os.path.dirname(torch.__file__))


ITERATORS: dict[str, Callable[[], Callable[[], float]]] = {
    "found by re": lambda: partial(lambda found: len(next(found).group()), re.finditer(r"\d+", "1 22 333")),
    "entries of a folder": lambda: partial(lambda found: len(next(found).name), entries()),
    "rows of csv": lambda: partial(lambda rows: float(next(rows)[0]), csv.reader(["1", "2", "3"])),
    "mapped": lambda: partial(next, map(abs, [-1.0, -2.0, -3.0])),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_iterators_of_c_go_on(name: str) -> None:
    plain, traced = ITERATORS[name](), ITERATORS[name]()
    graph = mg.trace(lambda x: x * traced())
    for call in range(3):
        assert torch.equal(X * plain(), graph(X)), call


def test_random_numbers_of_the_system_are_others_in_each_step() -> None:
    source = random.SystemRandom()
    graph = mg.trace(lambda x: x * source.random())
    assert len({graph(torch.ones(1)).item() for _ in range(3)}) == 3


class Scaled(torch.Tensor):
    """A tensor with a number in its class."""

    k = 2.0


def test_a_class_of_tensors() -> None:
    tensor = torch.ones(2).as_subclass(Scaled)
    graph = mg.trace(lambda x: x * tensor.k)
    try:
        for Scaled.k in (2.0, 3.0):
            assert torch.equal(graph(X), X * Scaled.k)
    finally:
        Scaled.k = 2.0
