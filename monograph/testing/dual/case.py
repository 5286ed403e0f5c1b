"""The case that runs now: where generators draw from, what is checked, and what was called so far."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, Protocol

from hypothesis import reject
from hypothesis import strategies as st

from monograph.testing import environment
from monograph.testing.dual.program import Program
from monograph.testing.modes import Mode


@dataclass(frozen=True)
class Options:
    """What `@autotest` was given."""

    examples: int
    auto_backward: bool | Literal["auto"]
    rtol: float | None
    atol: float | None
    check_graph: bool | Literal["ValidatedFalse"]
    check_dtype: bool
    check_allclose: bool
    random_gradients: bool
    include_complex: bool
    modes: tuple[str | Mode, ...]
    calls: int


@dataclass
class Tally:
    """How the cases of one run went, and what the test is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    passed: int = 0
    refused: int = 0
    last_refusal: str = ""


class Check(Protocol):
    """What is left to be checked of a call."""

    def run(self) -> None:
        """Raise an AssertionError if a graph gives something else."""


@dataclass
class Case:
    """One random case of a test."""

    data: st.DataObject
    options: Options
    tally: Tally
    seed: int
    complex_numbers: bool
    program: Program = field(default_factory=Program)
    checks: list[Check] = field(default_factory=list)  # of calls that eager mode took

    def draw(self, strategy: st.SearchStrategy[Any], label: str) -> Any:
        """A value that shrinks and replays with the case."""
        return self.data.draw(strategy, label=label)

    def refuse(self, error: Exception) -> NoReturn:
        """Give the case up: PyTorch itself refuses it. It is not counted."""
        self.tally.refused += 1
        self.tally.last_refusal = "".join(traceback.format_exception_only(error)).strip()
        if environment.verbose():
            print(f"PyTorch refuses this case: {self.tally.last_refusal}")
        reject()


_CURRENT: Final[ContextVar[Case | None]] = ContextVar("monograph_autotest_case", default=None)


def current_case() -> Case | None:
    """The case that runs in this context, if one does."""
    return _CURRENT.get()


def case_for(name: str) -> Case:
    """The case that runs; a plain sentence if `name` is used outside of a test."""
    case = _CURRENT.get()
    if case is None:
        raise RuntimeError(f"{name} draws a value only while a test decorated with @autotest runs")
    return case


@contextmanager
def running(case: Case) -> Iterator[None]:
    """Make `case` the one that runs."""
    token = _CURRENT.set(case)
    try:
        yield
    finally:
        _CURRENT.reset(token)
