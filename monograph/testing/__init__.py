"""Tools to check operators, modules, backends and passes: is a graph's result the one of eager mode?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from monograph.testing.align import Alignment, align
from monograph.testing.align_case import AlignCase
from monograph.testing.alignment.report import AlignmentError
from monograph.testing.modes import MODES, Mode

if TYPE_CHECKING:
    from monograph.testing import strategies
    from monograph.testing.dual import autotest, profile

__all__ = [
    "MODES",
    "AlignCase",
    "Alignment",
    "AlignmentError",
    "Mode",
    "align",
    "autotest",
    "profile",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """What needs Hypothesis is imported when it is asked for: training does not need it."""
    if name in ("autotest", "profile"):
        return getattr(importlib.import_module("monograph.testing.dual"), name)
    if name == "strategies":
        return importlib.import_module("monograph.testing.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
