"""Modules and classes by the names that pickles of version 0.1 know, for one release: each is a view of where its classes are now."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

# of graphs, checkpoints, specs and reports, which users can hold and pickle
RENAMED: Final[Mapping[str, str]] = {
    "monograph.capture.averages": "monograph.state.averages",
    "monograph.capture.dims": "monograph.ir.call.dims",
    "monograph.capture.probes": "monograph.ir.probes",
    "monograph.capture.signature": "monograph.ir.call.signature",
    "monograph.capture.state": "monograph.state.find",
    "monograph.demo": "monograph.cli.demo",
    "monograph.flow.optim.optimizers": "monograph.flow.optim",
    "monograph.inspect.comparison": "monograph.numerics.comparison",
    "monograph.inspect.debug": "monograph.inspect.printed.debug",
    "monograph.inspect.locate": "monograph.numerics.locate",
    "monograph.inspect.values": "monograph.inspect.summary",
    "monograph.inspect.verify": "monograph.numerics.verify",
    "monograph.lr_schedules": "monograph.flow.optim.lr_scheduler",
    "monograph.runtime.judge": "monograph.numerics.judge",
    "monograph.storage": "monograph.checkpoint",
    "monograph.storage.checkpoint": "monograph.checkpoint.save",
    "monograph.testing.collected": "monograph.testing.align_case",
    "monograph.testing.report": "monograph.testing.alignment.report",
}

# classes by module and name, and where they are now; the earlier module asks for them in its `__getattr__`
RENAMED_CLASSES: Final[Mapping[tuple[str, str], str]] = {
    ("monograph.errors", "Frame"): "monograph.user_code.lines.Frame",
    ("monograph.state.find", "HeldOptimizer"): "monograph.state.find.RegisteredOptimizer",
}


def renamed_class(module: str, name: str) -> Any:
    """The class that was there, with this name, before. Raises AttributeError if there is none."""
    now = RENAMED_CLASSES.get((module, name))
    if now is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    place, _, now_named = now.rpartition(".")
    return getattr(importlib.import_module(place), now_named)


class _View(Loader):
    """Fills a module with what another one has, when it is asked for."""

    def __init__(self, now: str) -> None:
        self._now = now

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(f"{module.__name__} is {self._now} now", DeprecationWarning, stacklevel=2)
        ask: Any = partial(_found_in, self._now)
        module.__dict__["__getattr__"] = ask


def _found_in(now: str, name: str) -> Any:
    return getattr(importlib.import_module(now), name)


class _Finder(MetaPathFinder):
    """Finds modules by their names of before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        now = RENAMED.get(fullname)
        if now is None:
            return None
        return ModuleSpec(fullname, _View(now), is_package=fullname == "monograph.storage")


def find_renamed_modules() -> None:
    """Let imports find them, after all modules that there are."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
