"""The variables of a function's closure; one that has no value yet is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def closure_of(function: Callable[..., Any]) -> dict[str, Any]:
    """By name what a function closes over. `inspect.getclosurevars` raises for a variable without a value."""
    names = function.__code__.co_freevars if hasattr(function, "__code__") else ()
    found = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found
