"""Globals of the code that ran, names in modules, and the modules that it imports."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from monograph.capture.guards.sources.attributes import isinstance_of
from monograph.capture.guards.sources.code_names import CodeNames
from monograph.capture.guards.sources.libraries import is_library_module
from monograph.capture.guards.sources.places import Entries
from monograph.capture.guards.sources.reach.recorded import Recorded, Visit
from monograph.capture.guards.sources.values import ABSENT


class Modules:
    """The names that code has looked up in dicts of globals and in modules. `known` is what was visited."""

    def __init__(
        self, recorded: Recorded, known: dict[int, Any], visit: Visit, may_ask: Callable[[Any], None]
    ) -> None:
        self._recorded, self._known, self._visit, self._may_ask = recorded, known, visit, may_ask
        self._tables: dict[int, Entries] = {}  # by id of the dict: globals and modules
        self._looked_up: set[tuple[int, int]] = set()  # ids of a module and of names
        self._imports: list[tuple[str, CodeNames]] = []  # by a text, with the names of the code that asked

    def take_globals(self, table: dict[str, Any], names: CodeNames, *, own: bool) -> None:
        """What code names in its globals; `own` code is the user's."""
        self._named(table, str(table.get("__name__", "globals")), names.globals, names.attributes, own=own)

    def take_variables(self, found: Iterable[Any], names: CodeNames) -> None:
        """What the user's code names in modules that it closes over."""
        for item in found:
            if isinstance_of(item, ModuleType):
                self._in_module(item, names.attributes, own=True)

    def take_whole_globals(self, table: dict[str, Any]) -> None:
        """All globals of code count, some of which are taken already."""
        self._recorded.make_whole(self._tables[id(table)])

    def take_import(self, name: str, names: CodeNames) -> None:
        """A module that code with these names imports."""
        self._named(sys.modules, "sys.modules", {name}, names.attributes, own=True)

    def note_import(self, name: str, names: CodeNames) -> None:
        """Code with these names may import a module by this text."""
        self._imports.append((name, names))

    def take_noted_imports(self) -> None:
        """Modules that the step has imported by a text: what its code names in them counts."""
        for name, names in self._imports:
            if name in sys.modules and not is_library_module(name):
                self.take_import(name, names)

    def _named(
        self, table: dict[str, Any], label: str, wanted: Iterable[str], names: frozenset[str], *, own: bool
    ) -> None:
        """Some names in the globals of code or in a module; of a library only what they stand for."""
        source = self._tables.get(id(table))
        if source is None:
            followed = not is_library_module(label)
            source = self._tables[id(table)] = Entries(label, table, set(), followed=followed)
            self._recorded.sources.append(source)
        for name in wanted:
            found = table.get(name, ABSENT)
            if name not in source.names:
                source.names.add(name)
                source.recorded[name] = found
            if own:
                self._may_ask(found)
            if isinstance_of(found, ModuleType):
                self._in_module(found, names, own=own)
                if own and not is_library_module(found.__name__):
                    self._visit(found, found.__name__)  # it may be handed on
            elif own and found is not ABSENT:
                self._visit(found, f"{label}.{name}", (source, name))

    def _in_module(self, module: ModuleType, names: frozenset[str], *, own: bool) -> None:
        """The names of one code object that a module has: `functional.relu`."""
        mark = (id(module), id(names))
        if mark in self._looked_up:
            return
        self._looked_up.add(mark)
        self._known[id(names)] = names
        table = vars(module)
        present = [name for name in names if name in table]
        self._named(table, str(table.get("__name__", "module")), present, names, own=own)
