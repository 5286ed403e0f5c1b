"""Attributes that C code keeps for the objects that were reached: those count that code names, and fields that can be set."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from monograph.capture.guards.sources.attributes import Descriptor
from monograph.capture.guards.sources.c_attributes import KeptByC, can_be_set, is_field, parts_of, read
from monograph.capture.guards.sources.reach.recorded import Recorded, Visit


class CParts:
    """Such attributes, with those that may come to count."""

    def __init__(self, recorded: Recorded, visit: Visit) -> None:
        self._recorded, self._visit = recorded, visit
        self._names: set[str] = set()  # that code of the user's spells, or what it looks into functions with
        self._waiting: dict[str, list[KeptByC]] = {}  # by names that may come to count

    def learn(self, names: Iterable[str]) -> set[str]:
        """Names that count from now on; gives those that are new."""
        new = set(names) - self._names
        self._names |= new
        return new

    def count(self, new: set[str]) -> None:
        """Record what objects that are known keep under new names."""
        for name in new & self._waiting.keys():
            for source in self._waiting.pop(name):
                self._add(source, name, parts_of(source.owner)[name])

    def take(self, value: Any, label: str) -> None:
        """What C code keeps for an object."""
        parts = parts_of(value)
        if not parts:
            return
        source = KeptByC(label, value)
        for name, part in parts.items():
            fields_of_c = is_field(part) and type(value) is not FunctionType and can_be_set(value, part)
            if name in self._names or fields_of_c:
                self._add(source, name, part)
            else:
                self._waiting.setdefault(name, []).append(source)

    def _add(self, source: KeptByC, name: str, part: Descriptor) -> None:
        if not can_be_set(source.owner, part):
            self._visit(module_behind(read(source.owner, part)), source.item_label(name))
        elif source.add(name, part):
            if len(source.parts) == 1:
                self._recorded.sources.append(source)
            self._recorded.record(source, name, read(source.owner, part))


def module_behind(item: Any) -> Any:
    """The module whose globals `item` is, as functions of C hold them; else `item`."""
    if type(item) is dict:
        module = sys.modules.get(str(item.get("__name__")))
        if module is not None and vars(module) is item:
            return module
    return item
