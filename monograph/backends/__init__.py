"""Backends: each lowers a plan to a runner, a callable from the program's inputs to its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from monograph.backends import aten
from monograph.plan.plan import Plan

Runner = Callable[..., tuple[Any, ...]]

LOWER: Mapping[str, Callable[[Plan], Runner]] = {"aten": aten.lower}

__all__ = ["LOWER", "Runner"]
