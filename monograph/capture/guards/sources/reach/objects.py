"""Objects that were reached: each is followed once, to what it is made of and to what it holds."""

from __future__ import annotations

import functools
import gc
import io
import logging
import operator
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from monograph.capture.guards.sources.attributes import (
    attributes_of,
    is_changeable,
    isinstance_of,
    slots_of,
)
from monograph.capture.guards.sources.code_names import attributes_in_format, looks_by_name
from monograph.capture.guards.sources.hidden import Probe, held_in_array, reader_of
from monograph.capture.guards.sources.libraries import is_library_module, is_tracing
from monograph.capture.guards.sources.places import Closure, Content, Entries, Kind, Slots
from monograph.capture.guards.sources.reach.asked import ENVIRONMENT
from monograph.capture.guards.sources.reach.c_parts import CParts, module_behind
from monograph.capture.guards.sources.reach.classes import Classes
from monograph.capture.guards.sources.reach.functions import Functions
from monograph.capture.guards.sources.reach.handed import Handed
from monograph.capture.guards.sources.reach.optimizers import GUARDED_APART, OptimizerEntries
from monograph.capture.guards.sources.reach.recorded import Recorded, Way
from monograph.capture.guards.sources.reach.weakly_held import WeaklyHeld
from monograph.capture.guards.sources.values import is_immutable
from monograph.compat.fakes import is_fake

_CACHE = type(functools.lru_cache(lambda: None))
# what decorators and annotations leave in classes: written once, and read by no step
_DESCRIPTIONS = (types.GenericAlias, types.UnionType)
# where a step writes to and does not read from
_SINKS = (logging.Filterer, logging.LogRecord, logging.Formatter, io.IOBase)
_LEVELS = {"level", "disabled", "parent"}
_WITHOUT_ATTRIBUTES = (OrderedDict,)  # of the standard library: containers that nobody gives attributes


class Objects:
    """The objects that were reached."""

    def __init__(
        self, recorded: Recorded, owner: Any, excluded: frozenset[str], unwrap: Callable[[Any], Any]
    ) -> None:
        """`owner` is the Graph, whose `excluded` attributes are its own business; `unwrap` gives the module of a block."""
        self.known: dict[int, Any] = {}  # what was visited, kept alive
        self.ways: dict[int, set[Any]] = {}  # by id of a container: sources and keys that lead to it
        self.caches: list[tuple[Any, str]] = []  # of functools, with the labels of their functions
        self.has_iterators = False  # which hold lists that nothing else may show
        self.has_lookups = False  # `getattr` and the like, which code may call by another name
        self.handed, self.weak = Handed(recorded, self.known), WeaklyHeld(owner)
        self.parts = CParts(recorded, self.visit)
        self.classes = Classes(recorded, self.parts, self.weak, self.known)
        self.functions = Functions(recorded, self.parts, self.known, self.visit)
        self._recorded, self._owner, self._excluded, self._unwrap = recorded, owner, excluded, unwrap
        self._loggers: set[int] = set()  # ids of loggers and their managers
        # objects of C whose texts and comparisons read all attributes; None once code may make those
        self._namespaces: list[dict[str, Any]] | None = []

    def visit(self, value: Any, label: str, way: Way | None = None) -> None:
        """Follow an object, once. `way` is the place that holds it, if that is known."""
        if type(value) in (list, dict, defaultdict, set, deque):
            self.ways.setdefault(id(value), set()).add(way or object())
        handed = self.handed.is_open if way is None else self.handed.owner(way[0]) is not None
        if not handed:
            self.handed.drop(value)
        if type(value) is str and "{" in value:
            self._recorded.make_up(attributes_in_format(value))
        if is_immutable(value) or id(value) in self.known or type(value) is ENVIRONMENT:
            return
        self.known[id(value)] = value
        self.has_lookups |= looks_by_name(value, "" if way is None else way[1])
        if handed:
            self.handed.note(value)
        kind = type(value)
        if kind is _CACHE:
            self.caches.append((value, label))
        value_unwrapped = self._unwrap(value)
        if value_unwrapped is not value:
            self.visit(value_unwrapped, label)
        elif kind is tuple or kind is frozenset:
            for index, item in enumerate(value):
                self.visit(item, f"{label}[{index}]")
        elif isinstance_of(value, type):
            self.classes.take(value)
        elif kind is FunctionType:
            self.functions.take(value, label)
        elif isinstance_of(value, ModuleType):
            self._module(value)
        elif kind is CellType:
            self._recorded.add(Closure(label, value))
        elif isinstance_of(value, torch.Tensor) and not is_fake(value):
            self._tensor(value, label)
        elif isinstance_of(value, logging.Logger):
            self._levels(value)
        elif not self.is_skipped(value):
            self._object(value, kind, label)

    def take_namespaces(self) -> None:
        """Code may make texts of objects and compare them: all that objects of C say of themselves counts."""
        if self._namespaces is not None:
            found, self._namespaces = self._namespaces, None
            for table in found:
                self._recorded.take_whole(table)

    def is_skipped(self, value: Any) -> bool:
        """True for what a step reads nothing from, or what is guarded apart."""
        kind = type(value)
        if (
            isinstance_of(value, torch.Tensor)
            or kind.__module__ in ("typing", "dataclasses")
            or kind in _DESCRIPTIONS
        ):
            return True
        if any(isinstance_of(value, sink) for sink in _SINKS) or _shows_text(value):
            return True
        return value is not self._owner and is_tracing(str(kind.__module__))

    # --- kinds of objects --------------------------------------------------------------------------------------------

    def _module(self, module: ModuleType) -> None:
        table = vars(module)
        if id(table) not in self._recorded.growing:
            own = not is_library_module(module.__name__)
            if own:
                self._recorded.add(Kind(module.__name__, module, False, followed=False))
            self._recorded.add(Entries(module.__name__, table, self._recorded.names, followed=own))

    def _tensor(self, tensor: Any, label: str) -> None:
        if not is_library_module(type(tensor).__module__):
            self.classes.take(type(tensor))
        table = attributes_of(tensor)
        if table:
            self._recorded.add(Kind(label, tensor, True, followed=False))
        if table is not None:
            self._recorded.add(Entries(label, table, self._recorded.names))

    def _levels(self, logger: logging.Logger | None) -> None:
        """What a logger answers a step that asks it for its level. It gives nothing else back."""
        while logger is not None:
            for owner, names in ((logger, _LEVELS), (logger.manager, {"_disable"})):
                if id(owner) not in self._loggers:
                    self._loggers.add(id(owner))
                    label = f"the logger {logger.name}"
                    self._recorded.add(Entries(label, vars(owner), names, followed=False))
            logger = logger.parent

    def _object(self, value: Any, kind: type, label: str) -> None:
        if kind in weakref.ProxyTypes:  # all that can be read of it is read of what it stands for
            self._reference(value, label)
            return
        self.classes.take(kind)
        is_container = any(isinstance_of(value, container) for container in (dict, list, set, deque))
        if is_container:
            self._recorded.add(Content(label, value))
        table = None if kind in _WITHOUT_ATTRIBUTES else attributes_of(value)
        if is_changeable(kind):
            self._recorded.add(Kind(label, value, table is not None, followed=False))
        if table is not None:
            self._attributes(value, kind, table, label)
        if slots := slots_of(kind):
            self._recorded.add(Slots(label, value, slots))
        self._hidden(value, kind, label)
        self.parts.take(value, label)
        for item in held_in_array(value):
            self.visit(item, label)
        if not is_container and gc.is_tracked(value):
            for item in gc.get_referents(value):
                if item is not table and item is not kind and type(item) is not type:
                    self.visit(module_behind(item), label)

    def _attributes(self, value: Any, kind: type, table: dict[str, Any], label: str) -> None:
        """The dict of attributes of an object."""
        names = self._recorded.names
        if isinstance_of(value, Optimizer):
            self._recorded.add(OptimizerEntries(label, table, names, kind=kind, excluded=GUARDED_APART))
        else:
            excluded = self._excluded if value is self._owner else frozenset()
            self._recorded.add(Entries(label, table, names, excluded=excluded))
        if isinstance_of(value, types.SimpleNamespace):
            if self._namespaces is None:
                self._recorded.take_whole(table)
            else:
                self._namespaces.append(table)

    def _hidden(self, value: Any, kind: type, label: str) -> None:
        """What an object of C hides, if there is a way to read it."""
        if isinstance_of(value, weakref.ref):
            self._reference(value, label)
        elif (reader := reader_of(value)) is not None:
            self._recorded.add(Probe(label, value, reader))
            self.has_iterators |= hasattr(kind, "__next__")
        elif kind in (operator.attrgetter, operator.methodcaller):
            texts = [name for name in value.__reduce__()[1] if type(name) is str]
            self._recorded.make_up(part for name in texts for part in name.split("."))

    def _reference(self, value: Any, label: str) -> None:
        """A weak reference or a proxy, and what it stands for."""
        reader = reader_of(value)
        assert reader is not None
        self.weak.note(reader.read(value))
        self._recorded.add(Probe(label, value, reader))


def _shows_text(value: Any) -> bool:
    """True for the streams that a process prints to, and not for a text in memory in their place, which can be read again."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return any(value is stream for stream in streams) and not isinstance_of(value, io.StringIO)
