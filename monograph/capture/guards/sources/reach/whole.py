"""Objects that count whole: those in the hands of code that makes up names."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch.optim import Optimizer

from monograph.capture.guards.sources.attributes import (
    attributes_of,
    class_table,
    is_changeable,
    isinstance_of,
)
from monograph.capture.guards.sources.libraries import is_library_module
from monograph.capture.guards.sources.reach.recorded import Recorded, Visit
from monograph.capture.guards.sources.values import is_immutable


class Whole:
    """Lets all count that an object holds. `unwrap` gives the module of a block; what `is_skipped` is not followed."""

    def __init__(
        self,
        recorded: Recorded,
        visit: Visit,
        unwrap: Callable[[Any], Any],
        is_skipped: Callable[[Any], bool],
    ) -> None:
        self._recorded, self._visit, self._unwrap, self._is_skipped = recorded, visit, unwrap, is_skipped

    def take(self, value: Any, names: frozenset[str], label: str) -> None:
        """All that an object holds counts, and what is reached from it under `names` and through containers."""
        pending, done = [value], set()
        while pending:
            item = self._unwrap(pending.pop())
            if id(item) in done or is_immutable(item):
                continue
            done.add(id(item))
            if isinstance_of(item, ModuleType) or self._is_skipped(item):
                continue
            self._visit(item, label)
            for cls in [*type(item).__mro__, *(item.__mro__ if isinstance_of(item, type) else ())]:
                if is_changeable(cls) and not is_library_module(cls.__module__):
                    self._recorded.take_whole(class_table(cls))
            if not isinstance_of(item, type):
                pending += self._parts(item, names)

    def _parts(self, item: Any, names: frozenset[str]) -> Iterator[Any]:
        table = attributes_of(item)
        if table is not None and type(item) is not FunctionType:
            self._recorded.take_whole(table)
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
