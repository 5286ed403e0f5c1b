"""Plans as generated Python: the text of their ops, with names for what they call, and the user's line where one fails."""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from monograph.backends.python.entries import Invocation, entries
from monograph.compat.modes import (
    num_dispatch_modes,
    outside_of_function_modes,
    profiler_is_on,
    profiler_marks,
)
from monograph.compat.ops import HigherOrderOperator, direct_call, failed_assertion, spelling
from monograph.ir.meta import origin
from monograph.ir.printer import Spell, branch_code, function_code, spell_target, spell_value
from monograph.ir.program import Program
from monograph.plan.overwrite import op_into
from monograph.plan.plan import Plan
from monograph.user_code.lines import Origin

_FILES = count()


def generated(
    plan: Plan,
    *,
    quick: bool = False,
    own: Iterable[Any] = (),
    parts: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Generated:
    """Compile the plan's text once; a call costs no more per op than the call of the op.

    A `quick` one calls ops by the functions of torch that take the least time; nobody may look at it while it runs. `own` has
    functions for what the plan calls besides ops, `parts` those that run instead of subgraphs, by name.
    """
    return Generated(plan, quick=quick, own=own, parts=parts)


class Scope:
    """What generated functions know by name: modules, and for each op that they call its entry in C++."""

    def __init__(
        self, mark: Callable[[str | None], None] | None = None, entries: Mapping[Any, Any] | None = None
    ) -> None:
        self._entries = entries or {}
        self.names: dict[str, Any] = {
            "torch": torch,
            "math": math,
            "operator": operator,
            "device": torch.device,
            "aten": torch.ops.aten,
            "mark": mark,
        }
        self._by_target: dict[Any, str] = {}

    def spell(self, target: Any) -> str:
        """The name of an op here."""
        unknown = target not in self._entries
        if unknown and (spelling(target) is None or isinstance(target, HigherOrderOperator)):
            return spell_target(target)
        if target not in self._by_target:
            name = f"op{len(self._by_target)}_{target.__name__.partition('.')[0]}"
            self._by_target[target] = name
            self.names[name] = self._entries.get(target) or direct_call(target)
        return self._by_target[target]

    def run(self, lines: Sequence[str], filename: str) -> str:
        """Define the functions of these lines, and give their text."""
        text = "\n".join(lines) + "\n"
        exec(
            compile(text, filename, "exec"), self.names
        )  # made from our own program, never loaded from a file
        return text


def lines_of(plan: Plan, scope: Scope, *, marks: bool = False) -> list[str]:
    """The functions of a plan and its parts. With marks they report each module that they come to."""
    lines: list[str] = []
    for item in (*plan.parts, plan):
        program = item.program
        lines += branch_code(program.module, scope.spell)
        lines += function_code(
            program.name,
            program.graph,
            spell=scope.spell,
            frees=item.frees,
            marks=marks,
            instead={
                node: over_text(node, item.into[node.name], scope.spell)
                for node in program.ops()
                if node.name in item.into
            },
        )
    return lines


def over_text(op: fx.Node, source: str, spell: Spell) -> str:
    """An op that writes over an argument."""
    into = op_into(op.target)
    assert into is not None
    target, out = into
    given = [spell_value(item) for item in op.args]
    options = [f"{name}={spell_value(item)}" for name, item in op.kwargs.items()]
    options += [f"{out}={source}"] if out else []
    return f"{op.name} = {spell(target)}({', '.join((*given, *options))})"


class Text:
    """Functions of generated text. An op's error gets a note with the user's line."""

    def __init__(
        self, program: Program, lines: Sequence[str], scope: Scope, ops: Mapping[int, fx.Node]
    ) -> None:
        """`ops` are by the number of their line, from 0, where its text does not say."""
        self._program, self._ops = program, ops
        self._filename = f"<monograph {program.name} {next(_FILES)}>"
        text = scope.run(lines, self._filename)
        self._lines = text.splitlines(keepends=True)
        linecache.cache[self._filename] = (len(text), None, self._lines, self._filename)

    def noted(self, raised: Exception) -> Exception:
        """The error for one that came out of the functions."""
        error, traceback = failed_assertion(raised), raised.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self._filename and (
                place := self._place_of(traceback.tb_lineno - 1)
            ):
                error.add_note(place)
            traceback = traceback.tb_next
        if error is not raised:
            error.__suppress_context__ = True
            error.__traceback__ = raised.__traceback__
        return error

    def _place_of(self, line: int) -> str | None:
        """Where the op of a line comes from."""
        node = self._ops.get(line)
        if node is None:
            name = self._lines[line].partition(" = ")[0].rpartition(" ")[2]
            node = next((node for node in self._program.ops() if node.name == name), None)
        return (
            None if node is None else f"in the graph: {spell_target(node.target)} from {_place(origin(node))}"
        )

    def __del__(self) -> None:
        linecache.cache.pop(self._filename, None)


class Generated:
    """Runs the generated function. Dispatch modes see the ops of the program, which write over nothing."""

    def __init__(
        self,
        plan: Plan,
        *,
        quick: bool = False,
        own: Iterable[Any] = (),
        parts: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        calls = (
            [Invocation(node.target, node.args, node.kwargs) for node in plan.program.ops()] if quick else []
        )
        scope = Scope(entries={**entries(calls), **{function: function for function in own}})
        self._parts = parts
        self._plan, self._context = plan, outside_of_function_modes if quick else nullcontext
        self._writes_over = any(item.into for item in (plan, *plan.parts))
        self._text = Text(plan.program, lines_of(plan, scope), scope, {})
        scope.names |= parts
        self.run = scope.names[plan.program.name]

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        made: tuple[Any, ...]
        if self._writes_over and num_dispatch_modes():
            return self._apart(inputs)
        try:
            with self._context():
                made = self.run(*inputs) if not profiler_is_on() else self._marked(*inputs)
        except Exception as error:
            raise self._text.noted(error)  # noqa: B904  # it is the same error, or stands for it
        return made

    @cached_property
    def _apart(self) -> Generated:
        parts = tuple(replace(part, into={}) for part in self._plan.parts)
        return Generated(replace(self._plan, into={}, parts=parts), parts=self._parts)

    def noted(self, error: Exception) -> Exception:
        """An error that came out of the function, with the user's line."""
        return self._text.noted(error)

    def _marked(self, *inputs: Any) -> tuple[Any, ...]:
        """The same with the modules in the trace of a profiler; made anew, since it is seldom asked for."""
        with profiler_marks() as mark:
            scope = Scope(mark)
            scope.run(lines_of(self._plan, scope, marks=True), "<monograph under a profiler>")
            scope.names |= self._parts
            made: tuple[Any, ...] = scope.names[self._plan.program.name](*inputs)
            return made


def _place(place: Origin) -> str:
    return f'"{place.file}", line {place.line}, module {place.module or "-"} ({place.phase})'
