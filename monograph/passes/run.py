"""Run passes: verify after each, time it, keep each stage, and blame by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from monograph.distributed.programs.collectives import calls_in_order, groups_in
from monograph.errors import MonographError, PassError
from monograph.ir.evaluate import fill_meta
from monograph.ir.program import Program
from monograph.ir.size_numbers import compute_sizes
from monograph.ir.text import Displayed, Text, count_text
from monograph.ir.verify import verify
from monograph.passes.dce import dce
from monograph.settings import pass_name
from monograph.sizes.size import Undecided
from monograph.user_code.lines import Origin, user_place_of

Pass = Callable[[Program], Program]
_HINT = "a pass takes a Program and returns one whose ports are the same; docs/passes.md shows how"


@dataclass(frozen=True)
class Stage(Displayed):
    """The program after one step of compilation, and the seconds the step took."""

    name: str
    program: Program
    seconds: float

    @property
    def text(self) -> Text:
        """The program of this stage as Python that runs."""
        return self.program.text

    def __str__(self) -> str:
        return str(self.text)

    def __repr__(self) -> str:
        return f"<Stage {self.name}: {count_text(len(list(self.program.ops())), 'op')}, {self.seconds:.2f} s>"


@dataclass(frozen=True)
class _Wrapped:
    """A pass under the name of the function that it calls."""

    function: Pass
    communicates: bool = (
        False  # adds collectives or merges them: no other pass may, all processes run them in one order
    )

    @property
    def __name__(self) -> str:
        return pass_name(self.function)


class AddedPass(_Wrapped):
    """A pass of the user's. It gets a copy of its own, so it may edit the graph in place; dead ops go afterwards."""

    def __call__(self, program: Program) -> Program:
        made = self.function(program.rebuilt())
        if not isinstance(made, Program):
            raise PassError(
                f"pass {self.__name__} returned {type(made).__name__}, not a Program",
                where=place_of(self.function),
                hint="return the program that was given, or program.with_graph(graph)",
            )
        fill_meta(made.graph)
        return dce(made.with_graph(made.graph))


class OnWhole(_Wrapped):
    """A pass that is for whole steps, not for the subgraphs that they call."""

    def __call__(self, program: Program) -> Program:
        made = self.function(program)
        fill_meta(made.graph)
        return made


class OfCollectives(_Wrapped):
    """A pass for steps that have collectives: no stage of others."""

    def __call__(self, program: Program) -> Program:
        return self.function(program)


def place_of(function: Pass) -> Origin | None:
    """Where a function, or the class of a callable object, says what it does; None if Python does not know."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return Origin(file=code.co_filename, line=code.co_firstlineno) if code is not None else None


def run_passes(first: Stage, passes: Iterable[Pass]) -> tuple[Stage, ...]:
    """All stages, the captured one first."""
    verify(first.program, after=first.name)
    stages = [first]
    for step in passes:
        if isinstance(step, OfCollectives) and not groups_in(stages[-1].program):
            continue
        start = time.perf_counter()
        program = _checked(step, stages[-1].program)
        stages.append(Stage(pass_name(step), program, time.perf_counter() - start))
    return tuple(stages)


def _checked(step: Pass, before: Program) -> Program:
    """What a pass makes of a program; whatever is wrong with it becomes an error that names the pass."""
    name, added = pass_name(step), isinstance(step, AddedPass)
    try:
        program = _applied(step, before)
    except MonographError:
        raise
    except Exception as error:
        if isinstance(error, Undecided) and not isinstance(step, _Wrapped):  # those are asked for
            return before  # it would do one thing at some sizes and another at others
        raise PassError(
            f"pass {name} failed: {type(error).__name__}: {error}",
            where=user_place_of(error),
            hint=_HINT if added else "",
        ) from error
    if program is before:
        return program
    for part in (program, *program.parts):
        compute_sizes(part.graph)
    try:
        verify(program, after=name)
        _check_collectives(step, before, program)
    except PassError as error:
        where = place_of(step.function) if isinstance(step, AddedPass) else None
        raise PassError(error.message, where=where or error.where, hint=_HINT if added else "") from None
    return program


def _check_collectives(step: Pass, before: Program, after: Program) -> None:
    may = isinstance(step, _Wrapped) and step.communicates
    if not may and list(calls_in_order(before)) != list(calls_in_order(after)):
        raise PassError(
            f"pass {pass_name(step)} drops collectives, adds some, or changes their order: other processes wait for them"
        )


def _applied(step: Pass, program: Program) -> Program:
    """The program with the pass run on its parts, and on itself."""
    if isinstance(step, OnWhole):
        return step(program)
    parts = tuple(_applied(step, part) for part in program.parts)
    changed = any(new is not old for new, old in zip(parts, program.parts, strict=True))
    return step(program.with_parts(parts) if changed else program)
