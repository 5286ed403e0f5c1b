"""A case as data, which the pytest plugin collects as a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.testing import environment
from monograph.testing.align import Alignment, align
from monograph.testing.alignment.refusals import checked_modes


@dataclass(frozen=True)
class AlignCase:
    """A call of `align` as data. A module-level AlignCase, or a list of them, is a test for each of its modes.

    `make` gives the function or module and its arguments; the random numbers that it draws follow the seed of the
    test run. `options` are those of `align`.

    >>> case = AlignCase("softmax", lambda: (torch.softmax, torch.randn(3, 4), 1))
    >>> print(case.run())
    softmax: forward and backward aligned in aten (3 calls each)
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise TypeError(f"make of AlignCase {self.name!r} is a function that gives (target, *args)")
        checked_modes(self.options.get("modes", ("aten",)))

    @property
    def modes(self) -> tuple[Any, ...]:
        """The modes that are aligned, one test each."""
        return tuple(self.options.get("modes", ("aten",)))

    def run(self, *modes: Any) -> Alignment:
        """Align in the given modes, or in all of the case."""
        with torch.random.fork_rng():
            seed = self.options.get("seed")
            torch.manual_seed(environment.seed() if seed is None else seed)
            made = self.make()
        if not isinstance(made, tuple) or not made:
            raise TypeError(f"make of AlignCase {self.name!r} gives a tuple (target, *args), got {made!r}")
        target, *args = made
        return align(target, *args, **{**self.options, "modes": modes or self.modes})
