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

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CellType, CodeType, FrameType
from typing import Any

import torch

from monograph.capture.guards.sources.attributes import attributes_of
from monograph.capture.guards.sources.code_names import CodeNames, is_computing, line_naming, names_of
from monograph.capture.guards.sources.code_watch import Verdict
from monograph.capture.guards.sources.libraries import is_library, is_library_module, is_standard, is_tracing
from monograph.capture.guards.sources.places import Entries, Source
from monograph.capture.guards.sources.reach.asked import Asked
from monograph.capture.guards.sources.reach.modules import Modules
from monograph.capture.guards.sources.reach.objects import Objects
from monograph.capture.guards.sources.reach.recorded import Recorded, Way
from monograph.capture.guards.sources.reach.unguarded import asks_of_paths, unguarded_in
from monograph.capture.guards.sources.reach.whole import Whole
from monograph.compat.modules import BY_NAME
from monograph.user_code.files import is_installed_file, is_user_file
from monograph.user_code.lines import Origin, user_place

# what it reads of functions and classes, its callers read
_LOOKS_INTO_FUNCTIONS = frozenset({"inspect"})
# what these modules call is none of the step: handlers of logs, and the bodies of modules that are imported meanwhile
_APART = ("logging", "importlib", "_frozen_importlib")
_STANDS_IN = "monograph.capture.numbers.python_functions"  # whose functions the step calls as those of Python
_SUBCLASSES = "__subclasses__"
_WHOLE_GLOBALS = frozenset({"globals", "eval", "exec"})


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
        self._recorded = Recorded(self._follow)
        self._asked = Asked(self._recorded, answers or {})
        self._objects = Objects(self._recorded, owner, excluded, unwrap)
        self._functions = self._objects.functions
        self._modules = Modules(self._recorded, self._objects.known, self._objects.visit, self._asked.may_ask)
        self._whole = Whole(self._recorded, self._objects.visit, unwrap, self._objects.is_skipped)
        # what moves unseen, by name, with the first line that names it
        self.unguarded: dict[str, Origin] = {}
        self.keys: set[str] = set()  # with which code uses the dict of some object
        self._read_for_it: set[str] = set()  # by code in place of the step's own
        self._libraries: set[int] = set()  # ids of codes
        self._has_modules = False  # if the user's code may get at modules by `sys.modules`
        self._globals: dict[int, int] = {}  # ids of the globals of libraries' code, by the id of that
        self._looks_by_names = False

    def _follow(self, value: Any, label: str, way: Way) -> None:
        self._asked.may_ask(value)
        self._objects.visit(value, label, way)

    # --- what was found ------------------------------------------------------------------------------------------------

    @property
    def sources(self) -> list[Source]:
        """The places, each with what was there."""
        return self._recorded.sources

    @property
    def containers(self) -> set[int]:
        """The ids of lists and dicts that were there before, among them those of attributes."""
        return {id(source.container()) for source in self.sources}

    @property
    def names(self) -> set[str]:
        """The names that count; more come while code runs."""
        return self._recorded.names

    @property
    def stored(self) -> set[str]:
        """The attributes that code gives values."""
        return self._recorded.stored

    @property
    def made_up(self) -> set[str]:
        """Names that no code spells where it asks for them."""
        return self._recorded.made_up

    @property
    def ways(self) -> Mapping[int, set[Any]]:
        """By id of a container: sources and keys that lead to it."""
        return self._objects.ways

    @property
    def caches(self) -> Iterable[tuple[Any, str]]:
        """Caches of functools, with the labels of their functions."""
        return self._objects.caches

    @property
    def weak(self) -> list[Any]:
        """What weak references stand for."""
        return self._objects.weak.objects

    @property
    def has_iterators(self) -> bool:
        """True if there are iterators, which hold lists that nothing else may show."""
        return self._objects.has_iterators

    @property
    def looks_by_names(self) -> bool:
        """True if code of the user's that ran may look for attributes under names that it does not spell."""
        return self._looks_by_names or self._objects.has_lookups

    def known(self) -> Iterable[Any]:
        """The objects that were reached."""
        return self._objects.known.values()

    def codes(self) -> Iterable[CodeType]:
        """The code that ran."""
        return self._functions.ran.values()

    def own_codes(self) -> Iterable[CodeType]:
        """The code that ran and is no library's."""
        return [code for known, code in self._functions.ran.items() if known not in self._libraries]

    def line_of(self, label: str) -> Origin | None:
        """The line of the user's that changes a place, by its label; None if no code spells its name."""
        return line_naming((code for code in self.own_codes() if is_user_file(code.co_filename)), label)

    def names_of_variable(self, cell: CellType) -> set[str]:
        """The names that a variable of closures has in the code that ran."""
        return self._functions.names_of_variable(cell)

    def knows_module(self, table: dict[str, Any]) -> bool:
        """True if code that ran may have the module whose globals are in this dict."""
        module = sys.modules.get(str(table.get("__name__")))
        return (
            self._has_modules
            or module is None
            or vars(module) is not table
            or id(module) in self._objects.known
        )

    def may_have_globals(self, code: CodeType, table: dict[str, Any]) -> bool:
        """False for code of a library that has other globals than these."""
        return self._globals.get(id(code), id(table)) == id(table)

    def may_read_dict(self, table: dict[str, Any], name: str) -> bool:
        """True if code that ran may have got at an attribute past `__getattribute__`, through the dict."""
        return name in self.keys or name in self._read_for_it or self._recorded.is_whole(table)

    def is_forgotten(self, source: Source) -> bool:
        """True for a place in an object that the step has made, and that nobody has any more."""
        return self._objects.handed.is_forgotten(source)

    def drop_forgotten(self) -> None:
        """Take out the places in instances of Python's classes that the step has made and forgotten."""
        self._objects.handed.drop_forgotten()

    def take_imports(self) -> None:
        """Modules that the step has imported by a text: what its code names in them counts."""
        self._modules.take_noted_imports()

    def leave_out(self, owner: Any, name: str) -> Entries | None:
        """An attribute that the step does not read, or gives a value before: what was there does not count. Gives its source."""
        table = attributes_of(owner)
        if table is None or self.may_read_dict(table, name):
            return None
        return self._recorded.leave_out(table, name)

    # --- what the step begins with, and code that runs ------------------------------------------------------------------

    def roots(self, values: Iterable[tuple[str, Any]]) -> None:
        """Objects that the step begins with, by their labels."""
        self._objects.classes.take(torch.Tensor)  # of fakes and arguments: methods may be put there
        for label, value in values:
            self._objects.visit(value, label)

    def may_read(self, names: Iterable[str]) -> None:
        """Attributes that code in place of the step's own reads, in whatever it knows."""
        self._read_for_it.update(names)
        self._recorded.grow(names)

    def may_read_of(self, owner: Any, label: str, names: Iterable[str]) -> None:
        """The same of an object that code of the step need not know."""
        self._recorded.add(Entries(label, vars(owner), set(names)))

    def may_ask(self, item: Any) -> None:
        """Code of the step knows this: if it asks for a mode, the answer counts."""
        self._asked.may_ask(item)

    def started(self, code: CodeType, frame: FrameType) -> Verdict:
        """Take in what a code object that is about to run can read."""
        module = _module_of(frame)
        if (verdict := self._aside(code, frame, module)) is not None:
            return verdict
        names, own = names_of(code), not is_library(code, module)
        if names.handed_on:
            self._hand_on(map(frame.f_locals.get, names.handed_on))
            if id(code) in self._functions.ran:
                return Verdict.AGAIN
        spelled = [frame.f_globals.get(name) for name in names.spelled_by]
        computed = names.computed or not all(type(name) is str for name in spelled)
        self._recorded.make_up(name for name in spelled if type(name) is str)
        self._functions.ran[id(code)] = code
        self.keys |= names.keys
        if not own:
            self._libraries.add(id(code))
            self._globals[id(code)] = id(frame.f_globals)
        self._has_modules |= own and "modules" in names.attributes
        self._recorded.grow(names.attributes)
        if own or module in _LOOKS_INTO_FUNCTIONS:
            # what code can read of its globals counts by the names of that code
            self._count_parts(names.attributes if own else names.attributes - {"__globals__"})
        self._recorded.will_store(names.stored)
        caller = frame.f_back
        if asks_of_paths(code, None if caller is None else caller.f_code):
            self.unguarded.setdefault("a file", user_place(caller))
        if not is_standard(module):
            self._modules.take_globals(frame.f_globals, names, own=own)
        if own:
            computed |= any(
                is_computing(name, frame.f_globals.get(name)) for name in names.globals | names.attributes
            )
            self._take_own(code, frame.f_globals, names)
            if not is_installed_file(code.co_filename):
                computed |= self._objects.has_lookups
                self._looks_by_names |= computed
                self.seen(code, map(frame.f_globals.get, names.globals if computed else ()))
        if names.handed_on and not computed:
            return Verdict.AGAIN
        return Verdict.FOLLOWED if computed and code not in BY_NAME else Verdict.TAKEN

    def _hand_on(self, given: Iterable[Any]) -> None:
        """Code looks for these names, which it was given."""
        names = [name for name in given if type(name) is str]
        self._recorded.make_up(names)
        self._count_parts(names)

    def _aside(self, code: CodeType, frame: FrameType, module: str) -> Verdict | None:
        """The verdict on code that reads nothing of the step's; None for all other."""
        if is_tracing(module):
            return Verdict.TRACING
        if code is importlib.import_module.__code__:
            caller = frame.f_back
            # what is installed asks by this for what else is
            if caller is not None and not is_installed_file(caller.f_code.co_filename):
                self._modules.note_import(frame.f_locals["name"], names_of(caller.f_code))
            return Verdict.AGAIN
        if module == "os" and not _is_called_by_tracing(frame) and self._asked.asks_environment(code, frame):
            return Verdict.AGAIN
        if module.partition(".")[0] in _APART:
            return Verdict.SINK
        return Verdict.LATER if is_standard(module) and _is_called_by_tracing(frame) else None

    def _count_parts(self, names: Iterable[str]) -> None:
        """Names of attributes that objects keep outside of dicts count from now on."""
        new = self._objects.parts.learn(names)
        if _SUBCLASSES in new:
            self._objects.classes.count_subclasses()
        self._objects.parts.count(new)

    def _take_own(self, code: CodeType, table: dict[str, Any], names: CodeNames) -> None:
        """What code of the user's can do besides, whose globals are `table`."""
        if names.whole:
            self._objects.take_namespaces()
        if names.globals & _WHOLE_GLOBALS:
            self._modules.take_whole_globals(table)
        for name in names.imports:
            self._modules.take_import(name, names)
        if "__import__" in names.globals:
            for name in code.co_consts:
                if type(name) is str:
                    self._modules.note_import(name, names)
        for what, where in unguarded_in(code, table, names):
            self.unguarded.setdefault(what, where)
        self._functions.started(code)
        self._modules.take_variables(self._functions.closed_over(code), names)

    def seen(self, code: CodeType, values: Iterable[Any]) -> None:
        """Objects in the hands of code that makes up names: all that they hold counts."""
        names, library = names_of(code).attributes, id(code) in self._libraries
        known, handed = self._objects.known, self._objects.handed
        for value in values:
            # a library has much in its hands that no step of a user's reaches: contexts, caches
            if id(value) in known or not (library or is_library_module(type(value).__module__)):
                handed.is_open = True
                self._whole.take(value, names, type(value).__name__)
                handed.is_open = False


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_called_by_tracing(frame: FrameType) -> bool:
    """True for code of the standard library that works for what traces, and not for the step."""
    caller = frame.f_back
    while caller is not None and ((module := _module_of(caller)) == _STANDS_IN or is_standard(module)):
        caller = caller.f_back
    return caller is not None and is_tracing(_module_of(caller))
