"""The `aten` backend: the program op by op, as generated Python. The oracle: always works, bitwise eager."""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.compat.modes import profiler_is_on, profiler_marks
from monograph.compat.ops import HigherOrderOperator, direct_call, failed_assertion, spelling
from monograph.ir.meta import origin
from monograph.ir.printer import branch_code, function_code, spell_target
from monograph.ir.program import Program
from monograph.kernels.select import select_kernels
from monograph.passes.run import Stage
from monograph.plan.plan import Plan, make_plan
from monograph.runtime.runner import Runner
from monograph.user_code.lines import Origin

_FILES = count()


def lower(order: LoweringRequest) -> LoweredProgram:
    """The plan as generated Python; with other kernels only where the settings ask for them."""
    settings = order.settings
    if settings.backend != "aten" or not settings.kernel_selection:
        return LoweredProgram("aten", Runner(generated(order.plan)))
    kernels, choices = select_kernels(Stage("plan", order.plan.program, 0.0), settings)
    return LoweredProgram("aten", Runner(generated(make_plan(kernels.program))), (kernels,), (), choices)


def generated(plan: Plan) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Compile the plan's text once; a call costs no more per op than the call of the op."""
    return _Generated(plan)


def _function(plan: Plan, filename: str, mark: Callable[[str | None], None] | None = None) -> tuple[Any, str]:
    """The function of a plan, and its text. With `mark` it reports each module that it comes to."""
    program = plan.program
    names: dict[str, Any] = {}
    by_target: dict[Any, str] = {}

    def spell(target: Any) -> str:
        if spelling(target) is None or isinstance(target, HigherOrderOperator):
            return spell_target(target)
        if target not in by_target:
            name = by_target[target] = f"op{len(by_target)}_{target.__name__.partition('.')[0]}"
            names[name] = direct_call(target)
        return by_target[target]

    lines: list[str] = []
    for item in (*plan.parts, plan):
        lines += branch_code(item.program.module, spell)
        marks = mark is not None
        lines += function_code(
            item.program.name, item.program.graph, spell=spell, frees=item.frees, marks=marks
        )
    text = "\n".join(lines) + "\n"
    scope: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "operator": operator,
        "device": torch.device,
        "aten": torch.ops.aten,
        "mark": mark,
    }
    scope |= names
    exec(compile(text, filename, "exec"), scope)  # text made from our own program, never loaded from a file
    return scope[program.name], text


class _Generated:
    """Runs the generated function; an op's error gets a note with the user's line."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._filename = plan, f"<monograph {plan.program.name} {next(_FILES)}>"
        self.run, text = _function(plan, self._filename)
        self._lines = text.splitlines(keepends=True)
        linecache.cache[self._filename] = (len(text), None, self._lines, self._filename)

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        run = self.run if not profiler_is_on() else self._marked
        made: tuple[Any, ...]
        try:
            made = run(*inputs)
        except Exception as raised:
            error, traceback = failed_assertion(raised), raised.__traceback__
            while traceback is not None:
                if traceback.tb_frame.f_code.co_filename == self._filename and (
                    place := _place_of_line(self._plan.program, self._lines[traceback.tb_lineno - 1])
                ):
                    error.add_note(place)
                traceback = traceback.tb_next
            if error is raised:
                raise
            raise error.with_traceback(raised.__traceback__) from None
        return made

    def _marked(self, *inputs: Any) -> tuple[Any, ...]:
        """The same with the modules in the trace of a profiler; made anew, since it is seldom asked for."""
        with profiler_marks() as mark:
            run, _ = _function(self._plan, "<monograph under a profiler>", mark)
            made: tuple[Any, ...] = run(*inputs)
            return made

    def __del__(self) -> None:
        linecache.cache.pop(self._filename, None)


def _place_of_line(program: Program, line: str) -> str | None:
    """Where the op of a line of the generated text comes from."""
    name = line.partition(" = ")[0].rpartition(" ")[2]
    node = next((node for node in program.ops() if node.name == name), None)
    return None if node is None else f"in the graph: {spell_target(node.target)} from {_place(origin(node))}"


def _place(place: Origin) -> str:
    return f'"{place.file}", line {place.line}, module {place.module or "-"} ({place.phase})'
