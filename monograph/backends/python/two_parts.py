"""A step in two parts: what can fail, and then what writes its state, each a function of generated text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from monograph.backends.python.entries import Invocation, entries
from monograph.backends.python.generated import Scope, Text, lines_of
from monograph.backends.python.step_code import APART, RUN, UPDATE, StepCode, invocation
from monograph.compat.modes import (
    hidden_from_dispatch_modes,
    num_dispatch_modes,
    outside_of_function_modes,
    profiler_is_on,
    profiler_marks,
)
from monograph.elementwise.updates import CompiledUpdate
from monograph.ir.ops.fused import IN_PLACE
from monograph.ir.printer import branch_code
from monograph.plan.updates.schedule import Schedule
from monograph.runtime.runner import Runner


def in_two_parts(
    schedule: Schedule,
    *,
    own: Iterable[Any] = (),
    compiled: Mapping[fx.Node, CompiledUpdate] = MappingProxyType({}),
    watched: Watching | None = None,
    parts: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Runner:
    """Runs a step that writes its state in its second part; `own` and `parts` are as for `generated`, `compiled` as for `StepCode`."""
    made = _InTwoParts(schedule, own, compiled, watched, parts)
    return Runner(made.run, written=schedule.tail.written, has_begun=made.has_begun, update=made.update)


class Watching(Protocol):
    """Runs a step in place of another one while somebody looks at ops."""

    @property
    def values_type(self) -> type:
        """The type of what `run` gives."""

    def run(self, inputs: list[Any]) -> Any:
        """The first part."""

    def update(self, made: Any) -> Sequence[Any]:
        """The second part."""

    def has_begun(self) -> bool:
        """True if the state may have changed in a run that has just failed."""


class _Apart(NamedTuple):
    """The outputs of a program that has run without changing its state, and the state that some of them replace."""

    outputs: list[Any]
    state: list[torch.Tensor]


class _InTwoParts:
    """`run` does all that can fail, and `update`, when it is asked to, the rest: functions of generated text."""

    def __init__(
        self,
        schedule: Schedule,
        own: Iterable[Any],
        compiled: Mapping[fx.Node, CompiledUpdate],
        watched: Watching | None,
        parts: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._parts = parts
        self._schedule, self._compiled, self._watched = schedule, compiled, watched
        self._own = {function: function for function in own}
        program = schedule.plan.program
        places = {port.path: place for place, port in enumerate(program.inputs)}
        self._written = sorted(schedule.tail.written)
        self._state = [places[program.outputs[position].path] for position in self._written]
        self._begun, self._unsure = [False], [not schedule.is_sure]
        scope, needed = self._scope_of(RUN, UPDATE)
        names = [program.inputs[place].name for place in self._state]
        self._needed_state = [needed.index(name) for name in names]
        self.run: Callable[[list[Any]], list[Any] | _Apart] = scope.names[RUN]
        self.update: Callable[[list[Any] | _Apart], list[Any]] = scope.names[UPDATE]

    def _scope_of(
        self, *names: str, mark: Callable[[str | None], None] | None = None
    ) -> tuple[Scope, list[str]]:
        """The names of these functions among others, and those of what the second part needs."""
        plan, tail = self._schedule.plan, self._schedule.tail
        calls = (*self._schedule.early, *self._schedule.second)
        last = {*tail.ops, *tail.exchange}
        invoked = [
            Invocation(node.target, node.args, node.kwargs)
            for node in plan.program.ops()
            if node.target not in IN_PLACE or node not in tail.into
        ]
        invoked += [
            invocation(call, in_place=call.ops[0] in tail.into)
            for call in calls
            if (call.list_op is not None or call.ops[0] in last) and call.ops[0] not in self._compiled
        ]
        scope = Scope(mark, entries={**entries(invoked), **self._own})
        lines = [line for part in plan.parts for line in lines_of(part, scope, marks=mark is not None)]
        lines += branch_code(plan.program.module, scope.spell)
        code = StepCode(self._schedule, scope.spell, names, marks=mark is not None, compiled=self._compiled)
        ops = {len(lines) + index: op for index, op in code.ops.items()}
        text = Text(plan.program, [*lines, *code.lines], scope, ops)
        scope.names |= code.functions | {
            "num_dispatch_modes": num_dispatch_modes,
            "profiler_is_on": profiler_is_on,
            "without_functions": outside_of_function_modes,
            "marking": mark is not None,
            "marked": self._marked,
            "watched": self._watched,
            "undone": self._undone,
            "apart": self._apart,
            "copied": self._copied,
            "noted": text.noted,
            "begun": self._begun,
            "unsure": self._unsure,
            **self._parts,
        }
        return scope, code.needed

    def has_begun(self) -> bool:
        """True if the state may have changed in a run that has just failed."""
        (begun,) = self._begun
        self._begun[0] = False
        return begun or (self._watched is not None and self._watched.has_begun())

    @cached_property
    def _second_apart(self) -> Scope:
        return self._scope_of(APART)[0]

    def _marked(self, name: str, given: Any) -> Any:
        """A part with the modules in the trace of a profiler; made anew, since it is seldom asked for."""
        with profiler_marks() as mark:
            return self._scope_of(name, mark=mark)[0].names[name](given)

    def _undone(self, update: Callable[[Any], list[Any]], values: list[Any] | _Apart) -> list[Any]:
        """An update that may fail: under a dispatch mode, or in the first step. Then the state is as it was."""
        state = (
            values.state if isinstance(values, _Apart) else [values[place] for place in self._needed_state]
        )
        with hidden_from_dispatch_modes():
            before = [item.clone() for item in state]
        try:
            outputs = update(values)
            self._unsure[0] = False
            return outputs
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
