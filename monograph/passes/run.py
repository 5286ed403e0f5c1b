"""Run passes: verify after each, time it, keep each stage, and blame by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from monograph.errors import MonographError, PassError
from monograph.ir.program import Program
from monograph.ir.verify import verify

Pass = Callable[[Program], Program]


@dataclass(frozen=True)
class Stage:
    """The program after one step of compilation, and the seconds the step took."""

    name: str
    program: Program
    seconds: float

    @property
    def text(self) -> str:
        """The program of this stage as Python that runs."""
        return self.program.text


def run_passes(first: Stage, passes: Iterable[Pass]) -> tuple[Stage, ...]:
    """All stages, the captured one first."""
    verify(first.program, after=first.name)
    stages = [first]
    for step in passes:
        name = getattr(step, "__name__", type(step).__name__)
        start = time.perf_counter()
        try:
            program = _applied(step, stages[-1].program)
        except MonographError:
            raise
        except Exception as error:
            raise PassError(f"pass {name} failed: {type(error).__name__}: {error}") from error
        verify(program, after=name)
        stages.append(Stage(name, program, time.perf_counter() - start))
    return tuple(stages)


def _applied(step: Pass, program: Program) -> Program:
    """The program with the pass run on its parts, and on itself."""
    return step(program.with_parts(tuple(_applied(step, part) for part in program.parts)))
