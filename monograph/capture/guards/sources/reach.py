"""Everything that a step could have read: found from the code that ran, not from a list of ways to read.

A running step gets at an object by a chain of reads from what it is given: the Graph, the globals that code names, the
variables that functions close over. Each link of the chain is one of these:

- an attribute, a global or a name in a module. Code that does so spells the name, so the names in the code that ran
  are all that can be asked for. Code that makes names up at run time is noticed, and the objects that it has in its
  hands are taken whole;
- an entry of a container, or what another object of C refers to: these are always taken whole;
- a variable of a closure or a default value, which belong to a function whose code ran.

So what is reachable by such links from the same beginnings is no less than what was read. It may be more.
"""

from __future__ import annotations

import builtins
import datetime
import dis
import functools
import gc
import importlib
import io
import logging
import operator
import os
import random
import sys
import time
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from monograph.capture.guards.sources.attributes import (
    Descriptor,
    attributes_of,
    class_table,
    is_changeable,
    isinstance_of,
    slots_of,
)
from monograph.capture.guards.sources.c_attributes import KeptByC, can_be_set, is_field, parts_of, read
from monograph.capture.guards.sources.closures import closure_of
from monograph.capture.guards.sources.code_names import CodeNames, is_computing, names_of
from monograph.capture.guards.sources.code_watch import Verdict
from monograph.capture.guards.sources.handed import Handed, places_of
from monograph.capture.guards.sources.hidden import Probe, held_in_array, reader_of
from monograph.capture.guards.sources.libraries import is_library, is_library_module, is_standard, is_tracing
from monograph.capture.guards.sources.places import (
    Bases,
    ClassEntries,
    Closure,
    Content,
    Entries,
    Function,
    Kind,
    Slots,
    Source,
    Subclasses,
)
from monograph.capture.guards.sources.questions import Answer, question_about
from monograph.capture.guards.sources.values import ABSENT, is_immutable, same
from monograph.compat.fakes import is_fake
from monograph.compat.optimizers import NOTES_IN_OPTIMIZERS, without_scheduler
from monograph.errors import CaptureError
from monograph.user_code.files import is_installed_file
from monograph.user_code.lines import Origin

# what it reads of functions and classes, its callers read
_LOOKS_INTO_FUNCTIONS = frozenset({"inspect"})
# what these modules call is none of the step: handlers of logs, and the bodies of modules that are imported meanwhile
_APART = ("logging", "importlib", "_frozen_importlib")
# where a step writes to and does not read from
# what decorators and annotations leave in classes: written once, and read by no step
_CACHE = type(functools.lru_cache(lambda: None))
_DESCRIPTIONS = (types.GenericAlias, types.UnionType)
_SINKS = (logging.Filterer, logging.LogRecord, logging.Formatter, io.IOBase)
_LEVELS = {"level", "disabled", "parent"}
# guarded apart: tensors, and numbers that may move; and what schedulers and scalers note for themselves
_OF_OPTIMIZERS = NOTES_IN_OPTIMIZERS | {"state", "param_groups"}
# they take the dict of a module apart, and look there for the name that they set
_SETTERS = tuple(
    function.__code__
    for function in (
        nn.Module.__setattr__,
        nn.Module.__delattr__,
        nn.Module.register_buffer,
        nn.Module.register_parameter,
        nn.Module.add_module,
    )
)
# functions whose results move without anything that could be looked at
_UNGUARDED = {
    id(item): name
    for name, item in (
        ("the clock", time.time), ("the clock", time.time_ns), ("the clock", time.monotonic),
        ("the clock", time.perf_counter), ("the clock", time.process_time), ("the clock", datetime.datetime),
        ("a file", open), ("a file", os.stat), ("a file", os.path.exists), ("a file", os.path.isfile),
        ("a file", os.path.isdir), ("a file", os.listdir), ("the working directory", os.getcwd),
        ("the keyboard", input), ("random bytes of the system", os.urandom),
        ("random bytes of the system", random.SystemRandom), ("random bytes of the system", uuid.uuid4),
    )
}  # fmt: skip
_SUBCLASSES = "__subclasses__"
_WHOLE_GLOBALS = frozenset({"globals", "eval", "exec"})
_WITHOUT_ATTRIBUTES = (OrderedDict,)  # of the standard library: containers that nobody gives attributes


class Reach:
    """The places that the code that ran so far can read from, each with what was there before it could."""

    def __init__(
        self,
        owner: Any,
        excluded: frozenset[str],
        unwrap: Callable[[Any], Any],
        answers: Mapping[str, Any] | None = None,
    ) -> None:
        """`owner` is the Graph, whose `excluded` attributes are its own business; `unwrap` gives the module of a block.

        `answers` is what questions were answered before the trace.
        """
        self._answers, self._asked = answers or {}, set[str]()
        self.sources: list[Source] = []
        self.caches: list[tuple[Any, str]] = []  # of functools, with the labels of their functions
        self.names: set[str] = {"training", "build", "forward", "step", "__getattr__"}
        self.stored: set[str] = set()
        self.unguarded: dict[
            str, Origin
        ] = {}  # what moves unseen, by name, with the first line that names it
        self.keys: set[str] = set()  # with which code uses the dict of some object
        self.made_up: set[str] = set()  # names that no code spells where it asks for them
        self.ways: dict[int, set[Any]] = {}  # by id of a list or dict: sources and keys that lead to it
        self.weak: list[Any] = []  # what weak references stand for
        self.has_iterators = False  # which hold lists that nothing else may show
        self._owner, self._excluded, self._unwrap = owner, excluded, unwrap
        self._growing: dict[
            int, Entries
        ] = {}  # by id of the dict; whose relevant entries are those with a name in `names`
        self._known: dict[int, Any] = {}  # what was visited, kept alive
        self._tables: dict[int, Entries] = {}  # by id of the dict: globals and modules
        self._functions: dict[int, list[tuple[FunctionType, str]]] = {}  # by id of their code
        self._ran: dict[int, CodeType] = {}
        self._libraries: set[int] = set()  # ids of codes
        self._nested: set[int] = set()  # ids of the codes of functions that the step itself makes
        self._handled: set[tuple[int, int]] = set()
        self._c_names: set[str] = (
            set()
        )  # that code of the user's spells, or what it looks into functions with
        self._classes: list[type] = []  # that code may ask for their subclasses
        self._kept_by_c: dict[str, list[KeptByC]] = {}  # by names that may come to count
        self._imports: list[tuple[str, CodeNames]] = []  # by a text, with the names of the code that asked
        self._handed, self._looks_at_hands = Handed(), False
        # objects of C whose texts and comparisons read all attributes; None once code may make those
        self._namespaces: list[dict[str, Any]] | None = []
        self._dropped: list[Source] = []  # they still show the objects that they are in

    def codes(self) -> Iterable[CodeType]:
        """The code that ran."""
        return self._ran.values()

    def may_read_dict(self, table: dict[str, Any], name: str) -> bool:
        """True if code that ran may have got at an attribute past `__getattribute__`, through the dict."""
        source = self._growing.get(id(table))
        return name in self.keys or (source is not None and source.whole)

    def is_forgotten(self, source: Source) -> bool:
        """True for a place in an object that the step has made, and that nobody has any more."""
        owner = self._handed.owner(source)
        return owner is not None and self._handed.forgotten(owner, self._own_records())

    def take_imports(self) -> None:
        """Modules that the step has imported by a text: what its code names in them counts."""
        for name, names in self._imports:
            if name in sys.modules and not is_library_module(name):
                self._import(name, names)

    def _import(self, name: str, names: CodeNames) -> None:
        self._named(sys.modules, "sys.modules", {name}, names.attributes, own=True)

    def drop_forgotten(self) -> None:
        """Take out the places in instances of Python's classes that the step has made and forgotten."""
        owners = [self._handed.owner(source) for source in self.sources]
        instances = {owner for owner in owners if owner is not None and self._handed.is_instance(owner)}
        ours = self._own_records() if instances else []
        forgotten = {owner for owner in instances if self._handed.forgotten(owner, ours)}
        pairs = list(zip(self.sources, owners, strict=True))
        self._dropped += [source for source, owner in pairs if owner in forgotten]
        self.sources = [source for source, owner in pairs if owner not in forgotten]

    def _own_records(self) -> list[Any]:
        """What refers to objects for this reach alone."""
        return [self._known, self._growing, *places_of([*self.sources, *self._dropped])]

    def leave_out(self, owner: Any, name: str) -> None:
        """An attribute that the step itself gives a value before it reads it: what was there does not count."""
        table = attributes_of(owner)
        source = None if table is None else self._growing.get(id(table))
        if source is not None and table is not None and not self.may_read_dict(table, name):
            source.excluded |= {name}
            source.recorded.pop(name, None)

    # --- code that runs ------------------------------------------------------------------------------------------------

    def started(self, code: CodeType, frame: FrameType) -> Verdict:
        """Take in what a code object that is about to run can read."""
        module = _module_of(frame)
        if is_tracing(module):
            return Verdict.TRACING
        if code is importlib.import_module.__code__:
            caller = frame.f_back
            # what is installed asks by this for what else is
            if caller is not None and not is_installed_file(caller.f_code.co_filename):
                self._imports.append((frame.f_locals["name"], names_of(caller.f_code)))
            return Verdict.AGAIN
        if module.partition(".")[0] in _APART:
            return Verdict.SINK
        names, own = names_of(code), not is_library(code, module)
        if is_standard(module) and _is_called_by_tracing(frame):
            return Verdict.LATER
        spelled = [frame.f_globals.get(name) for name in names.spelled_by]
        computed = names.computed or not all(type(name) is str for name in spelled)
        self.made_up.update(name for name in spelled if type(name) is str)
        self._grow(name for name in spelled if type(name) is str)
        self._ran[id(code)] = code
        self.keys |= names.keys
        if not own:
            self._libraries.add(id(code))
        self._grow(names.attributes)
        if own or module in _LOOKS_INTO_FUNCTIONS:
            # what code can read of its globals counts by the names of that code
            self._name_parts(names.attributes if own else names.attributes - {"__globals__"})
        self._will_store(names.stored)
        if code is os.getenv.__code__:
            self.visit(os.environ, "os.environ")
        if not is_standard(module):
            self._globals(frame.f_globals, names, own=own)
        if own:
            if names.whole and self._namespaces is not None:
                found, self._namespaces = self._namespaces, None
                for table in found:
                    self._take_whole(table)
            computed |= any(
                is_computing(name, frame.f_globals.get(name)) for name in names.globals | names.attributes
            )
            if names.globals & _WHOLE_GLOBALS:
                self._make_whole(self._tables[id(frame.f_globals)])
            for name in names.imports:
                self._import(name, names)
            if "__import__" in names.globals:
                self._imports += [(name, names) for name in code.co_consts if type(name) is str]
            self._look_for_unguarded(code, frame.f_globals, names)
            for function, label in self._functions.get(id(code), ()):
                self._activate(function, label)
            if id(code) not in self._functions and code.co_freevars and id(code) not in self._nested:
                self._find_functions(code)
            self._nested.update(id(item) for item in code.co_consts if isinstance(item, CodeType))
        return Verdict.FOLLOWED if computed and code not in _SETTERS else Verdict.TAKEN

    def _look_for_unguarded(self, code: CodeType, table: dict[str, Any], names: CodeNames) -> None:
        if not is_installed_file(code.co_filename):
            for name in names.globals:
                found = table.get(name, getattr(builtins, name, None))
                inside = vars(found) if isinstance_of(found, ModuleType) else {}
                for item, spelled in [
                    (found, name),
                    *((inside.get(n), n) for n in names.attributes if n in inside),
                ]:
                    if id(item) in _UNGUARDED:
                        line = next(
                            (
                                i.positions.lineno
                                for i in dis.get_instructions(code)
                                if i.argval == spelled and i.positions
                            ),
                            0,
                        )
                        where = Origin(file=code.co_filename, line=line or code.co_firstlineno)
                        self.unguarded.setdefault(_UNGUARDED[id(item)], where)

    def seen(self, code: CodeType, values: Iterable[Any]) -> None:
        """Objects in the hands of code that makes up names: all that they hold counts."""
        names, library = names_of(code).attributes, id(code) in self._libraries
        for value in values:
            # a library has much in its hands that no step of a user's reaches: contexts, caches
            if id(value) in self._known or not (library or is_library_module(type(value).__module__)):
                self._looks_at_hands = True
                self._whole(value, names, type(value).__name__)
                self._looks_at_hands = False

    def roots(self, values: Iterable[tuple[str, Any]]) -> None:
        """Objects that the step begins with, by their labels."""
        self._class(torch.Tensor)  # of fakes and arguments: methods may be put there
        for label, value in values:
            self.visit(value, label)

    def _grow(self, names: Iterable[str]) -> None:
        new = set(names) - self.names
        if not new:
            return
        self.names |= new
        for source in list(self._growing.values()):
            if not source.whole:
                entries = source.entries
                for name in [name for name in new if name in entries and name not in source.excluded]:
                    self._record(source, name, entries[name])

    def _name_parts(self, names: Iterable[str]) -> None:
        """Names of attributes that objects keep outside of dicts count from now on."""
        new = set(names) - self._c_names
        self._c_names |= new
        if _SUBCLASSES in new:
            for cls in self._classes:
                self._subclasses(cls)
        for name in new & self._kept_by_c.keys():
            for source in self._kept_by_c.pop(name):
                self._add_part(source, name, parts_of(source.owner)[name])

    def _parts_in_c(self, value: Any, label: str) -> None:
        """What C code keeps for an object."""
        parts = parts_of(value)
        if not parts:
            return
        source = KeptByC(label, value)
        for name, part in parts.items():
            fields_of_c = is_field(part) and type(value) is not FunctionType and can_be_set(value, part)
            if name in self._c_names or fields_of_c:
                self._add_part(source, name, part)
            else:
                self._kept_by_c.setdefault(name, []).append(source)

    def _add_part(self, source: KeptByC, name: str, part: Descriptor) -> None:
        if not can_be_set(source.owner, part):
            self.visit(_module_behind(read(source.owner, part)), source.item_label(name))
        elif source.add(name, part):
            if len(source.parts) == 1:
                self.sources.append(source)
            self._record(source, name, read(source.owner, part))

    def _will_store(self, names: Iterable[str]) -> None:
        new = set(names) - self.stored
        if new:
            self.stored |= new
            for source in self._growing.values():
                self._note_overwritten(source, new)

    def _note_overwritten(self, source: Entries, names: Iterable[str]) -> None:
        for name in names:
            if name not in source.recorded:
                source.overwritten.setdefault(name, source.entries.get(name, ABSENT))

    def _record(self, source: Source, key: Any, value: Any) -> None:
        if key not in source.recorded:
            source.recorded[key] = value
            if source.followed:
                self.may_ask(value)
                self.visit(value, source.item_label(key), (source, key))

    def _add(self, source: Source) -> None:
        """A new source: record what is there, and follow it."""
        self.sources.append(source)
        if isinstance(source, Entries) and source.names is self.names:
            self._growing[id(source.entries)] = source
            self._note_overwritten(source, self.stored)
        self._refill(source)

    # --- globals and modules -----------------------------------------------------------------------------------------------

    def _globals(self, table: dict[str, Any], names: CodeNames, *, own: bool) -> None:
        self._named(table, str(table.get("__name__", "globals")), names.globals, names.attributes, own=own)

    def _named(
        self, table: dict[str, Any], label: str, wanted: Iterable[str], names: frozenset[str], *, own: bool
    ) -> None:
        """Some names in the globals of code or in a module; of a library only what they stand for."""
        source = self._tables.get(id(table))
        if source is None:
            followed = not is_library_module(label)
            source = self._tables[id(table)] = Entries(label, table, set(), followed=followed)
            self.sources.append(source)
        for name in wanted:
            found = table.get(name, ABSENT)
            if name not in source.names:
                source.names.add(name)
                source.recorded[name] = found
            if own:
                self.may_ask(found)
            if isinstance_of(found, ModuleType):
                self._in_module(found, names, own=own)
                if own and not is_library_module(found.__name__):
                    self.visit(found, found.__name__)  # it may be handed on
            elif own and found is not ABSENT:
                self.visit(found, f"{label}.{name}", (source, name))

    def _in_module(self, module: ModuleType, names: frozenset[str], *, own: bool) -> None:
        """The names of one code object that a module has: `functional.relu`."""
        mark = (id(module), id(names))
        if mark in self._handled:
            return
        self._handled.add(mark)
        self._known[id(names)] = names
        table = vars(module)
        self._named(
            table,
            str(table.get("__name__", "module")),
            [name for name in names if name in table],
            names,
            own=own,
        )

    def may_ask(self, item: Any) -> None:
        """Code of the step knows this: if it asks for a mode, the answer counts."""
        question = question_about(item)
        if question is not None and question.label not in self._asked:
            self._asked.add(question.label)
            answer = Answer(question.label, question.ask, followed=False)
            self._add(answer)
            before = self._answers.get(question.label, answer.recorded[""])
            if question.is_set_by_steps and not (question.is_no_in_captures and before):
                answer.recorded[""] = before
            elif question.is_no_in_captures or not same(before, answer.recorded[""]):
                raise CaptureError(
                    f"code of the step can ask for {question.label}, which a capture sets to another value",
                    hint="ask before the step, and keep the answer in an attribute",
                )

    # --- functions ---------------------------------------------------------------------------------------------------------

    def _function(self, function: FunctionType, label: str) -> None:
        code = function.__code__
        if is_library(code, str(function.__globals__.get("__name__", ""))):
            for inner in closure_of(function).values():  # what a library's decorator stands around
                if type(inner) is FunctionType:
                    self.visit(inner, label)
            return
        self._functions.setdefault(id(code), []).append((function, label))
        self._add(Kind(label, function, True, followed=False))
        self._add(Entries(label, function.__dict__, self.names))
        self._parts_in_c(function, label)
        if id(code) in self._ran:
            self._activate(function, label)

    def _activate(self, function: FunctionType, label: str) -> None:
        """A function whose code runs: its defaults, and the variables that it closes over."""
        if (id(function), 0) in self._handled:
            return
        self._handled.add((id(function), 0))
        self._add(Function(label, function))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if id(cell) not in self._known:
                self._known[id(cell)] = cell
                self._add(Closure(f"{label}.<closure>.{name}", cell))

    def _find_functions(self, code: CodeType) -> None:
        """Functions with this code that were reached in no way: C code holds them, or this very step made them."""
        for item in gc.get_referrers(code):
            globals_of: Any = getattr(
                item, "__globals__", None
            )  # None in what another thread is clearing away
            if type(item) is FunctionType and globals_of is not None and id(item) not in self._known:
                self.visit(item, item.__qualname__)

    # --- objects -------------------------------------------------------------------------------------------------------------

    def visit(self, value: Any, label: str, way: tuple[Source, Any] | None = None) -> None:
        """Follow an object, once. `way` is the place that holds it, if that is known."""
        if type(value) in (list, dict, defaultdict):
            self.ways.setdefault(id(value), set()).add(way or object())
        handed = self._looks_at_hands if way is None else self._handed.owner(way[0]) is not None
        if not handed:
            self._handed.drop(value)
        if is_immutable(value) or id(value) in self._known:
            return
        self._known[id(value)] = value
        if handed:
            self._handed.note(value)
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
            self._class(value)
        elif kind is FunctionType:
            self._function(value, label)
        elif isinstance_of(value, ModuleType):
            if id(vars(value)) not in self._growing:
                own = not is_library_module(value.__name__)
                self._add(Kind(value.__name__, value, False, followed=False)) if own else None
                self._add(Entries(value.__name__, vars(value), self.names, followed=own))
        elif kind is CellType:
            self._add(Closure(label, value))
        elif isinstance_of(value, torch.Tensor) and not is_fake(value):
            table = attributes_of(value)
            if table:
                self._add(Kind(label, value, True, followed=False))
            if table is not None:
                self._add(Entries(label, table, self.names))
        elif isinstance_of(value, logging.Logger):
            self._levels(value)
        elif not self._is_skipped(value, kind):
            self._object(value, kind, label)

    def _levels(self, logger: logging.Logger | None) -> None:
        """What a logger answers a step that asks it for its level. It gives nothing else back."""
        while logger is not None:
            for owner, names in ((logger, _LEVELS), (logger.manager, {"_disable"})):
                if (id(owner), 2) not in self._handled:
                    self._handled.add((id(owner), 2))
                    self._add(Entries(f"the logger {logger.name}", vars(owner), names, followed=False))
            logger = logger.parent

    def _is_skipped(self, value: Any, kind: type) -> bool:
        if (
            isinstance_of(value, torch.Tensor)
            or kind.__module__ in ("typing", "dataclasses")
            or kind in _DESCRIPTIONS
        ):
            return True
        if any(isinstance_of(value, sink) for sink in _SINKS):
            return True
        return value is not self._owner and is_tracing(str(kind.__module__))

    def _object(self, value: Any, kind: type, label: str) -> None:
        if kind in weakref.ProxyTypes:  # all that can be read of it is read of what it stands for
            self._add_weak(label, value)
            return
        self._class(kind)
        content: Any = None
        if any(isinstance_of(value, container) for container in (dict, list, set, deque)):
            content = value
            self._add(Content(label, value))
        table = None if kind in _WITHOUT_ATTRIBUTES else attributes_of(value)
        if is_changeable(kind):
            self._add(Kind(label, value, table is not None, followed=False))
        if table is not None:
            if isinstance_of(value, Optimizer):
                self._add(OptimizerEntries(label, table, self.names, kind=kind, excluded=_OF_OPTIMIZERS))
            else:
                excluded = self._excluded if value is self._owner else frozenset()
                self._add(Entries(label, table, self.names, excluded=excluded))
            if isinstance_of(value, types.SimpleNamespace):
                if self._namespaces is None:
                    self._take_whole(table)
                else:
                    self._namespaces.append(table)
        if slots := slots_of(kind):
            self._add(Slots(label, value, slots))
        if isinstance_of(value, weakref.ref):
            self._add_weak(label, value)
        elif (reader := reader_of(value)) is not None:
            self._add(Probe(label, value, reader))
            self.has_iterators |= hasattr(kind, "__next__")
        elif kind in (operator.attrgetter, operator.methodcaller):
            parts = {part for name in value.__reduce__()[1] if type(name) is str for part in name.split(".")}
            self.made_up |= parts
            self._grow(parts)
        self._parts_in_c(value, label)
        for item in held_in_array(value):
            self.visit(item, label)
        if content is None and gc.is_tracked(value):
            for item in gc.get_referents(value):
                if item is not table and item is not kind and type(item) is not type:
                    self.visit(_module_behind(item), label)

    def _add_weak(self, label: str, value: Any) -> None:
        """A weak reference or a proxy, and what it stands for."""
        reader = reader_of(value)
        assert reader is not None
        found = reader.read(value)
        self._note_weak(found)
        self._add(Probe(label, value, reader))

    def _note_weak(self, found: Any) -> None:
        """An object that a weak reference stands for: the step must not keep it alive."""
        stays = any(isinstance_of(found, kind) for kind in (Optimizer, ModuleType)) or is_fake(found)
        if isinstance_of(found, type):
            stays = not is_changeable(found) or is_library_module(found.__module__)
        if found is not None and found is not self._owner and not stays:
            self.weak.append(found)

    def _may_be_asked(self, cls: type) -> None:
        """Code may ask a class of the user's for its subclasses."""
        self._classes.append(cls)
        if _SUBCLASSES in self._c_names:
            self._subclasses(cls)

    def _subclasses(self, cls: type) -> None:
        """The classes made from one whose subclasses code asks for. It refers to them weakly."""
        if (id(cls), 3) not in self._handled:
            self._handled.add((id(cls), 3))
            subclasses: list[type] = type.__subclasses__(cls)
            for found in subclasses:
                self._note_weak(found)
            self._add(Subclasses(cls.__qualname__, cls))

    def _class(self, cls: type) -> None:
        if (id(cls), 1) in self._handled:
            return
        self._handled.add((id(cls), 1))
        self._known[id(cls)] = cls
        if type(cls) is not type and is_changeable(type(cls)):
            self._class(type(cls))
        if is_changeable(cls):
            label = cls.__qualname__
            self._add(Bases(label, cls))
            self._parts_in_c(cls, label)
            if is_changeable(type(cls)):
                self._add(Kind(label, cls, False, followed=False))
            own = not is_library_module(cls.__module__)
            self._add(ClassEntries(label, class_table(cls), self.names, cls=cls, followed=own))
            if own:
                self._may_be_asked(cls)
        for base in cls.__mro__[1:]:
            self._class(base)

    # --- objects that count whole -----------------------------------------------------------------------------------------

    def _whole(self, value: Any, names: frozenset[str], label: str) -> None:
        """All that an object holds counts, and what is reached from it under `names` and through containers."""
        pending, done = [value], set()
        while pending:
            item = self._unwrap(pending.pop())
            if id(item) in done or is_immutable(item):
                continue
            done.add(id(item))
            if isinstance_of(item, ModuleType) or self._is_skipped(item, type(item)):
                continue
            self.visit(item, label)
            for cls in [*type(item).__mro__, *(item.__mro__ if isinstance_of(item, type) else ())]:
                if is_changeable(cls) and not is_library_module(cls.__module__):
                    self._take_whole(class_table(cls))
            if not isinstance_of(item, type):
                pending += self._parts(item, names)

    def _parts(self, item: Any, names: frozenset[str]) -> Iterator[Any]:
        table = attributes_of(item)
        if table is not None and type(item) is not FunctionType:
            self._take_whole(table)
            yield from [table[name] for name in names if name in table]
        if isinstance_of(item, dict):
            yield from dict.values(item)
        elif any(isinstance_of(item, kind) for kind in (list, tuple, set, deque)):
            yield from item
        elif type(item) is weakref.ref:
            yield item()
        elif (
            not isinstance_of(item, Optimizer)
            and table is None
            and gc.is_tracked(item)
            and type(item) is not FunctionType
        ):
            yield from (part for part in gc.get_referents(item) if not isinstance_of(part, type))

    def _take_whole(self, table: dict[str, Any]) -> None:
        source = self._growing.get(id(table))
        if source is not None and not source.whole:
            self._make_whole(source)

    def _make_whole(self, source: Entries) -> None:
        source.whole = True
        self._refill(source)
        now = list(source.now())  # the order counts
        source.recorded = {name: source.recorded[name] for name in now if name in source.recorded}

    def _refill(self, source: Source) -> None:
        for key, value in source.now().items():
            self._record(source, key, value)


@dataclass(eq=False)
class OptimizerEntries(Entries):
    """Attributes of an optimizer. The wrapper that a scheduler puts around `step` changes nothing in a step."""

    kind: type

    def now(self) -> Mapping[Any, Any]:
        found = dict(super().now())
        if "step" in found:
            step = without_scheduler(found.pop("step"), self.kind)
            found |= {} if step is None else {"step": step}
        return found


def _module_behind(item: Any) -> Any:
    """The module whose globals `item` is, as functions of C hold them; else `item`."""
    if type(item) is dict:
        module = sys.modules.get(str(item.get("__name__")))
        if module is not None and vars(module) is item:
            return module
    return item


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_called_by_tracing(frame: FrameType) -> bool:
    """True for code of the standard library that works for what traces, and not for the step."""
    caller = frame.f_back
    while caller is not None and is_standard(_module_of(caller)):
        caller = caller.f_back
    return caller is not None and is_tracing(_module_of(caller))
