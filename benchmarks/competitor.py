"""A training step that is ready to be run and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Competitor:
    """`step(*batch)` trains once; `read` waits for what it returned and gives the loss.

    `parameters()` gives each parameter by its name in the PyTorch model, as an array that may be overwritten later, and
    `capture_seconds()` how long a capture before any compilation has taken, where there is one.
    """

    step: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    read: Callable[[Any], float]
    parameters: Callable[[], Mapping[str, Any]]
    capture_seconds: Callable[[], float | None] = lambda: None
