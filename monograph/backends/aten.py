"""The `aten` backend: the program op by op, as generated Python. The oracle: always works, bitwise eager.

New state is computed where the old one is as far as ops cannot fail there: see `monograph/plan/tail.py`.
"""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import fx

from monograph.backends.entries import Invocation, entries
from monograph.backends.lowering import LoweredProgram, LoweringRequest, kept_for
from monograph.backends.step_code import APART, RUN, UPDATE, StepCode, invocation
from monograph.compat.modes import (
    hidden_from_dispatch_modes,
    num_dispatch_modes,
    outside_of_function_modes,
    profiler_is_on,
    profiler_marks,
)
from monograph.compat.ops import HigherOrderOperator, direct_call, failed_assertion, spelling
from monograph.ir.meta import TensorMeta, origin, value
from monograph.ir.ops.fused import IN_PLACE
from monograph.ir.printer import branch_code, function_code, spell_target
from monograph.ir.program import Program
from monograph.kernels.select import select_kernels
from monograph.kernels.tuned import TunedKernel
from monograph.passes.inductor.foreach_to_single import foreach_to_single
from monograph.passes.inductor.inline_parts import inline_single_calls
from monograph.passes.run import Stage
from monograph.plan.check import check_plan
from monograph.plan.memory import MemoryPlan
from monograph.plan.plan import Plan, make_plan
from monograph.plan.schedule import Schedule, schedule
from monograph.plan.tail import tail_of
from monograph.runtime.runner import Runner
from monograph.user_code.lines import Origin

_FILES = count()
_LARGE = 1 << 20  # bytes; the C library keeps less than that by itself


def lower(order: LoweringRequest) -> LoweredProgram:
    """The plan as generated Python; with other kernels only where the settings ask for them."""
    plan, stages, choices = program_to_run(order)
    scheduled = _scheduled(order, plan)
    runner = Runner(generated(plan)) if scheduled is None else in_two_parts(scheduled)
    memory = plan.memory if scheduled is None else scheduled.plan.memory
    return LoweredProgram("aten", runner, stages, memory_notes(memory, plan), choices, memory=memory)


def program_to_run(
    order: LoweringRequest,
) -> tuple[Plan, tuple[Stage, ...], tuple[TunedKernel, ...]]:
    """The plan, or one with the kernels that are fastest here if the settings ask for them; the stage, and what was chosen."""
    if order.settings.is_compiled or not order.settings.kernel_selection:
        return order.plan, (), ()
    kernels, choices = select_kernels(Stage("plan", order.plan.program, 0.0), order.settings)
    return make_plan(kernels.program), (kernels,), choices


def memory_notes(memory: MemoryPlan, plan: Plan) -> tuple[str, ...]:
    """Keep what a large step frees for the next one, and say so."""
    return kept_for(plan, memory) if memory.peak_bytes >= _LARGE else ()


def _scheduled(order: LoweringRequest, plan: Plan) -> Schedule | None:
    """The plan with its updates in place; None if there are none."""
    single = in_single_ops(plan)
    tail = tail_of(single, order.in_place)
    if tail is None:
        return None
    made = schedule(single, tail, at_once=order.settings.updates_at_once)
    check_plan(made.plan)
    return made


def in_two_parts(schedule: Schedule, *, own: Iterable[Any] = ()) -> Runner:
    """Runs a step that writes its state in its second part; `own` is as for `generated`."""
    parts = _InTwoParts(schedule, own)
    return Runner(parts.run, written=schedule.tail.written, has_begun=parts.has_begun, update=parts.update)


def in_single_ops(plan: Plan) -> Plan:
    """The same without parts that are called once, and without ops on lists: on CPUs these are loops over single ops."""
    program = inline_single_calls(plan.program)
    inputs = map(value, program.graph.find_nodes(op="placeholder"))
    if all(item.device.type == "cpu" for item in inputs if isinstance(item, TensorMeta)):
        program = foreach_to_single(program)
    return plan if program is plan.program else make_plan(program)


def generated(plan: Plan, *, quick: bool = False, own: Iterable[Any] = ()) -> Generated:
    """Compile the plan's text once; a call costs no more per op than the call of the op.

    A `quick` one calls ops by the functions of torch that take the least time; nobody may look at it while it runs. `own` has
    functions for what the plan calls besides ops.
    """
    return Generated(plan, quick=quick, own=own)


class _Scope:
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


def _lines_of(plan: Plan, scope: _Scope, *, marks: bool = False) -> list[str]:
    """The functions of a plan and its parts. With marks they report each module that they come to."""
    lines: list[str] = []
    for item in (*plan.parts, plan):
        program = item.program
        lines += branch_code(program.module, scope.spell)
        lines += function_code(program.name, program.graph, spell=scope.spell, frees=item.frees, marks=marks)
    return lines


class _Text:
    """Functions of generated text. An op's error gets a note with the user's line."""

    def __init__(
        self, program: Program, lines: Sequence[str], scope: _Scope, ops: Mapping[int, fx.Node]
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
    """Runs the generated function."""

    def __init__(self, plan: Plan, *, quick: bool = False, own: Iterable[Any] = ()) -> None:
        calls = (
            [Invocation(node.target, node.args, node.kwargs) for node in plan.program.ops()] if quick else []
        )
        scope = _Scope(entries={**entries(calls), **{function: function for function in own}})
        self._plan, self._context = plan, outside_of_function_modes if quick else nullcontext
        self._text = _Text(plan.program, _lines_of(plan, scope), scope, {})
        self.run = scope.names[plan.program.name]

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        made: tuple[Any, ...]
        try:
            with self._context():
                made = self.run(*inputs) if not profiler_is_on() else self._marked(*inputs)
        except Exception as error:
            raise self._text.noted(error)  # noqa: B904  # it is the same error, or stands for it
        return made

    def noted(self, error: Exception) -> Exception:
        """An error that came out of the function, with the user's line."""
        return self._text.noted(error)

    def _marked(self, *inputs: Any) -> tuple[Any, ...]:
        """The same with the modules in the trace of a profiler; made anew, since it is seldom asked for."""
        with profiler_marks() as mark:
            scope = _Scope(mark)
            scope.run(_lines_of(self._plan, scope, marks=True), "<monograph under a profiler>")
            made: tuple[Any, ...] = scope.names[self._plan.program.name](*inputs)
            return made


class _Apart(NamedTuple):
    """The outputs of a program that has run without changing its state, and the state that some of them replace."""

    outputs: list[Any]
    state: list[torch.Tensor]


class _InTwoParts:
    """`run` does all that can fail, and `update`, when it is asked to, the rest: functions of generated text."""

    def __init__(self, schedule: Schedule, own: Iterable[Any]) -> None:
        self._schedule = schedule
        self._own = {function: function for function in own}
        program = schedule.plan.program
        places = {port.path: place for place, port in enumerate(program.inputs)}
        self._written = sorted(schedule.tail.written)
        self._state = [places[program.outputs[position].path] for position in self._written]
        self._begun = [False]
        scope, needed = self._scope_of(RUN, UPDATE)
        names = [program.inputs[place].name for place in self._state]
        self._needed_state = [needed.index(name) for name in names]
        self.run: Callable[[list[Any]], list[Any] | _Apart] = scope.names[RUN]
        self.update: Callable[[list[Any] | _Apart], list[Any]] = scope.names[UPDATE]

    def _scope_of(
        self, *names: str, mark: Callable[[str | None], None] | None = None
    ) -> tuple[_Scope, list[str]]:
        """The names of these functions among others, and those of what the second part needs."""
        plan, tail = self._schedule.plan, self._schedule.tail
        calls = (*self._schedule.early, *self._schedule.second)
        last = set(tail.ops)
        invoked = [
            Invocation(node.target, node.args, node.kwargs)
            for node in plan.program.ops()
            if node.target not in IN_PLACE or node not in tail.into
        ]
        invoked += [
            invocation(call, in_place=call.ops[0] in tail.into)
            for call in calls
            if call.list_op is not None or call.ops[0] in last
        ]
        scope = _Scope(mark, entries={**entries(invoked), **self._own})
        lines = [line for part in plan.parts for line in _lines_of(part, scope, marks=mark is not None)]
        lines += branch_code(plan.program.module, scope.spell)
        code = StepCode(self._schedule, scope.spell, names, marks=mark is not None)
        ops = {len(lines) + index: op for index, op in code.ops.items()}
        text = _Text(plan.program, [*lines, *code.lines], scope, ops)
        scope.names |= {
            "num_dispatch_modes": num_dispatch_modes,
            "profiler_is_on": profiler_is_on,
            "without_functions": outside_of_function_modes,
            "marking": mark is not None,
            "marked": self._marked,
            "undone": self._undone,
            "apart": self._apart,
            "copied": self._copied,
            "noted": text.noted,
            "begun": self._begun,
        }
        return scope, code.needed

    def has_begun(self) -> bool:
        """True if the state may have changed in a run that has just failed."""
        (begun,) = self._begun
        self._begun[0] = False
        return begun

    @cached_property
    def _second_apart(self) -> _Scope:
        return self._scope_of(APART)[0]

    def _marked(self, name: str, given: Any) -> Any:
        """A part with the modules in the trace of a profiler; made anew, since it is seldom asked for."""
        with profiler_marks() as mark:
            return self._scope_of(name, mark=mark)[0].names[name](given)

    def _undone(self, update: Callable[[Any], list[Any]], values: list[Any] | _Apart) -> list[Any]:
        """An update under a dispatch mode, which may raise at any op: then the state is as it was."""
        state = (
            values.state if isinstance(values, _Apart) else [values[place] for place in self._needed_state]
        )
        with hidden_from_dispatch_modes():
            before = [item.clone() for item in state]
        try:
            return update(values)
        except BaseException:
            with hidden_from_dispatch_modes():
                torch._foreach_copy_(state, before)
            self._begun[0] = False
            raise

    def _apart(self, values: list[Any], inputs: Sequence[Any]) -> _Apart:
        """The second part with new state in memory of its own: its ops may fail."""
        names = self._second_apart.names
        try:
            return _Apart(names[APART](values), [inputs[place] for place in self._state])
        except Exception as error:
            raise names["noted"](error)  # noqa: B904  # it is the same error, or stands for it

    def _copied(self, made: _Apart) -> list[Any]:
        """Write state that was computed apart."""
        outputs = made.outputs
        with hidden_from_dispatch_modes():
            torch._foreach_copy_(made.state, [outputs[position] for position in self._written])
        for position in self._written:
            outputs[position] = None
        return outputs


def _place(place: Origin) -> str:
    return f'"{place.file}", line {place.line}, module {place.module or "-"} ({place.phase})'
