"""A case: what is aligned, with which arguments, against what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from monograph.compat.ops import custom_op_name
from monograph.testing.alignment.arguments import Arguments
from monograph.testing.alignment.comparison import Tolerance
from monograph.testing.alignment.step import MakeOptimizer, Target
from monograph.testing.modes import Mode


@dataclass(frozen=True)
class Case:
    """One call of `align`, as data."""

    target: Target
    arguments: Arguments
    modes: tuple[Mode, ...]
    grad: bool
    against: Literal["eager", "float64"] | Callable[..., Any]
    calls: int
    more: tuple[tuple[Any, ...], ...]
    seed: int
    optimizer: MakeOptimizer | None
    tolerance: Tolerance
    verbose: bool

    @property
    def name(self) -> str:
        """What messages call the target."""
        if isinstance(self.target, nn.Module):
            return type(self.target).__name__
        owner = getattr(self.target, "__self__", None)
        if isinstance(owner, type):  # such as `apply` of an autograd.Function
            return f"{owner.__name__}.{getattr(self.target, '__name__', '')}"
        found = getattr(self.target, "__name__", None) or getattr(self.target, "name", None)
        found = found or custom_op_name(self.target)  # of a custom op
        return found if isinstance(found, str) else type(self.target).__name__

    @property
    def reference_name(self) -> str:
        """What messages call the reference."""
        return replace(self, target=self.against, against="eager").name if callable(self.against) else "eager"

    @property
    def reference(self) -> Target:
        """What says which numbers are right: the target itself, in eager mode, or another implementation."""
        return self.against if callable(self.against) else self.target

    def bitwise(self, mode: Mode) -> bool:
        """True if this mode must give the bits of the reference."""
        return mode.bitwise and self.against == "eager" and not self.tolerance.close
