"""Functions that were reached. Once their code runs, their defaults and the variables that they close over count."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from monograph.capture.guards.sources.closures import closure_of
from monograph.capture.guards.sources.libraries import is_library, is_library_module
from monograph.capture.guards.sources.places import Closure, Entries, Function, Kind
from monograph.capture.guards.sources.reach.c_parts import CParts
from monograph.capture.guards.sources.reach.recorded import Recorded, Visit


class Functions:
    """Functions by their code, and the code that ran. `known` is what was visited."""

    def __init__(self, recorded: Recorded, parts: CParts, known: dict[int, Any], visit: Visit) -> None:
        self._recorded, self._parts, self._known, self._visit = recorded, parts, known, visit
        self.ran: dict[int, CodeType] = {}  # by id
        self._by_code: dict[int, list[tuple[FunctionType, str]]] = {}  # by id of their code
        self._active: set[int] = set()  # ids of functions whose code runs
        self._nested: set[int] = set()  # ids of the codes of functions that the step itself makes

    def take(self, function: FunctionType, label: str) -> None:
        """A function; of a library's only what its decorators stand around: functions, methods and objects of the user's."""
        code = function.__code__
        if is_library(code, str(function.__globals__.get("__name__", ""))):
            for inner in closure_of(function).values():
                owner = inner.__self__ if type(inner) is MethodType else inner
                if type(inner) is FunctionType or not is_library_module(str(type(owner).__module__)):
                    self._visit(inner, label)
            return
        self._by_code.setdefault(id(code), []).append((function, label))
        self._recorded.add(Kind(label, function, True, followed=False))
        self._recorded.add(Entries(label, function.__dict__, self._recorded.names))
        self._parts.take(function, label)
        if id(code) in self.ran:
            self._activate(function, label)

    def started(self, code: CodeType) -> None:
        """Code of the user's runs: so do the functions that have it."""
        for function, label in self._by_code.get(id(code), ()):
            self._activate(function, label)
        if id(code) not in self._by_code and code.co_freevars and id(code) not in self._nested:
            self._find(code)
        self._nested.update(id(item) for item in code.co_consts if isinstance(item, CodeType))

    def _activate(self, function: FunctionType, label: str) -> None:
        """A function whose code runs: its defaults, and the variables that it closes over."""
        if id(function) in self._active:
            return
        self._active.add(id(function))
        self._recorded.add(Function(label, function))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if id(cell) not in self._known:
                self._known[id(cell)] = cell
                self._recorded.add(Closure(f"{label}.<closure>.{name}", cell))

    def closed_over(self, code: CodeType) -> Iterator[Any]:
        """What the functions with this code close over, of those that were reached."""
        for function, _ in self._by_code.get(id(code), ()):
            yield from closure_of(function).values()

    def names_of_variable(self, cell: CellType) -> set[str]:
        """The names that a variable has in the functions whose code ran."""
        ran = (function for code in self.ran for function, _ in self._by_code.get(code, ()))
        return {
            name
            for function in ran
            for name, item in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if item is cell
        }

    def _find(self, code: CodeType) -> None:
        """Functions with this code that were reached in no way: C code holds them, or this very step made them."""
        for item in gc.get_referrers(code):
            globals_of: Any = getattr(
                item, "__globals__", None
            )  # None in what another thread is clearing away
            if type(item) is FunctionType and globals_of is not None and id(item) not in self._known:
                self._visit(item, item.__qualname__)
