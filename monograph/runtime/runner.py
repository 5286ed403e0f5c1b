"""Runner: what a backend makes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Runner:
    """Runs a program: `run(prepared)` on what `prepare(inputs)` gives; `finish(results, prepared)` makes the outputs.

    `written` are the positions of outputs that `run` writes into the state itself; `finish` gives None for them. Then
    `run` is one call of C, which no interrupt divides: it has happened or it has not.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    prepare: Callable[[list[Any]], list[Any]] | None = None
    finish: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]] | None = None
    written: frozenset[int] = frozenset()
