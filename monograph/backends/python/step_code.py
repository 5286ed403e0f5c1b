"""A step in two parts as Python text: what can fail, and what writes state; the second with new state apart, too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx

from monograph.backends.python.entries import Invocation
from monograph.backends.python.generated import over_text
from monograph.distributed.programs.collectives import held_for
from monograph.elementwise.updates import CompiledUpdate
from monograph.ir.meta import computes, form, grad_mode, output_nodes
from monograph.ir.printer import Spell, call_text, function_code, module_and_phase, spell_value
from monograph.plan.updates.counterparts import NumberTensors, op_in_place
from monograph.plan.updates.groups import TailCall
from monograph.plan.updates.schedule import Schedule

RUN, UPDATE, APART = "run", "update", "second_part_apart"
_FIRST, _SECOND = "first_part", "second_part"
_RUN = f"""\
def {RUN}(inputs):
    if watched is not None and (num_dispatch_modes() or profiler_is_on()):
        return watched.run(inputs)
    if profiler_is_on() and not marking:
        return marked({RUN!r}, inputs)
    try:
        with without_functions():
            fits, values = {_FIRST}(*inputs)
        return values if fits else apart(values, inputs)
    except Exception as error:
        raise noted(error)
"""
_UPDATE = f"""\
def {UPDATE}(values):
    if watched is not None and type(values) is watched.values_type:
        return watched.update(values)
    if not marking:
        if num_dispatch_modes() or unsure[0]:
            return undone({UPDATE}_all, values)
        if profiler_is_on():
            return marked({UPDATE!r}, values)
    return {UPDATE}_all(values)

def {UPDATE}_all(values):
    begun[0] = True
    try:
        with without_functions():
            outputs = {_SECOND}(values) if type(values) is list else copied(values)
    except Exception as error:
        raise noted(error)
    begun[0] = False
    return outputs
"""


class StepCode:
    """The lines of functions, and by the numbers of lines, from 0, the ops that the second part calls.

    `run(inputs)` runs the first part, and gives a list of what the second needs: the values `needed`. `update(values)` runs the
    second, empties the list, and gives the outputs: None for those that are in the state. `second_part_apart` changes nothing
    but the list. With `marks`, they report each module that they come to.

    They ask for functions by name. `apart(values, inputs)` runs a second part that may fail, since a number does not fit into
    its type; `copied` writes what it has made. `undone` runs an update that somebody who looks at ops may let fail, and `marked`
    the functions with marks. `watched` runs the whole step while somebody looks at ops, where these do not show them.
    """

    def __init__(
        self,
        schedule: Schedule,
        spell: Spell,
        names: Collection[str],
        *,
        marks: bool = False,
        compiled: Mapping[fx.Node, CompiledUpdate] = MappingProxyType({}),
    ) -> None:
        """`compiled` has the calls that compiled code makes, by their first ops; `functions` names what is to be called."""
        self._compiled = {op: (f"update{index}", call) for index, (op, call) in enumerate(compiled.items())}
        self.functions: dict[str, Any] = {}
        for name, call in self._compiled.values():
            self.functions |= {name: call.run, f"{name}_takes": call.takes}
        self.lines: list[str] = []
        self.ops: dict[int, fx.Node] = {}
        self._spell, self._marks, self._tail = spell, marks, {*schedule.tail.ops, *schedule.tail.exchange}
        graph, tail = schedule.plan.program.graph, schedule.tail
        self._outputs, self._over = output_nodes(graph), schedule.over
        first = set(schedule.first)
        self._second = [op for op in graph.nodes if computes(op) and op not in first]
        read = [item for op in self._second for item in held_for(op)]
        returned = [item for item in self._outputs if isinstance(item, fx.Node)]
        made = set(self._second)
        self.needed = list(dict.fromkeys(item.name for item in (*read, *returned) if item not in made))
        if RUN in names:
            self._write_first(schedule)
            self.lines += _RUN.splitlines()
        if UPDATE in names:
            self._write_second(_SECOND, schedule.second, tail.into, tail.written)
            self.lines += _UPDATE.splitlines()
        if APART in names:
            self._write_second(APART, [TailCall((op,)) for op in self._second], {}, frozenset())

    def _write_first(self, schedule: Schedule) -> None:
        needed = set(self.needed)
        dead = {
            op: [item for item in items if item not in needed] for op, items in schedule.plan.frees.items()
        }
        instead = {op: over_text(op, self._over[op].name, self._spell) for op in self._over}
        instead |= dict.fromkeys(self._second, "")
        for call in schedule.early:
            instead |= dict.fromkeys(call.ops, "")
            instead[call.ops[0]] = self._call(call, {}, _Variables({}))
        self.lines += function_code(
            _FIRST,
            schedule.plan.program.graph,
            spell=self._spell,
            frees=dead,
            marks=self._marks,
            instead=instead,
            returned=f"{' and '.join(self._conditions(schedule))}, [{', '.join(self.needed)}]",
        )

    def _conditions(self, schedule: Schedule) -> Iterator[str]:
        """What has to hold for the second part to write: else its ops run with new state apart."""
        yield _fits(schedule)
        for name, call in self._compiled.values():
            yield f"{name}_takes({_listed(call.given)}, {_listed(call.numbers)})"

    def _write_second(
        self, name: str, calls: Sequence[TailCall], into: Mapping[fx.Node, fx.Node], written: Iterable[int]
    ) -> None:
        variables = _Variables(into)
        self.lines += [
            f"def {name}(values):",
            f"    {', '.join(self.needed)}, = values",
            "    values.clear()",
        ]
        returned = [None if i in written else item for i, item in enumerate(self._outputs)]
        kept = {variables.of(item) for item in returned if isinstance(item, fx.Node)}
        frees = variables.frees(calls, kept)
        for call, dead, mark in zip(calls, frees, self._marks_of(calls), strict=True):
            self.lines += mark
            self.ops[len(self.lines)] = call.ops[0]
            self.lines.append(f"    {self._call(call, into, variables)}")
            if dead:
                self.lines.append(f"    del {', '.join(dead)}")
        self.lines += ["    mark(None)"] if self._marks else []
        self.lines.append(f"    return [{', '.join(map(variables.text, returned))}]")

    def _marks_of(self, calls: Iterable[TailCall]) -> Iterator[list[str]]:
        """For each call the line that reports its module, if that is another one than before."""
        marked = ""
        for call in calls:
            place = module_and_phase(call.ops[0]) if self._marks else marked
            yield [f"    mark({place!r})"] if place != marked else []
            marked = place

    def _call(self, call: TailCall, into: Mapping[fx.Node, fx.Node], variables: _Variables) -> str:
        first = call.ops[0]
        if first in self._compiled and first in into:
            name, update = self._compiled[first]
            return f"{name}({', '.join(node.name for node in update.tensors)})"
        if first in self._over:
            return over_text(first, self._over[first].name, self._spell)
        if first not in self._tail and call.list_op is None:
            mode = (
                "" if (enabled := grad_mode(first)) is None else f"with torch.set_grad_enabled({enabled}): "
            )
            return f"{mode}{first.name} = {call_text(first, self._spell)}"
        made = "" if first in into else f"{', '.join(op.name for op in call.ops)} = "
        target, args, kwargs = invocation(call, in_place=first in into)
        options = [f"{name}={variables.text(item)}" for name, item in kwargs.items()]
        return f"{made}{self._spell(target)}({', '.join([*map(variables.text, args), *options])})"


def invocation(call: TailCall, *, in_place: bool) -> Invocation:
    """What a call of a tail calls, and with what."""
    first = call.ops[0]
    if call.list_op is None:
        target = op_in_place(first.target) if in_place else first.target
        return Invocation(target, tuple(first.args), dict(first.kwargs))
    lists: list[Any] = [[op.args[place] for op in call.ops] for place in range(call.num_tensors)]
    if not call.numbers:
        return Invocation(call.list_op.op, tuple(lists), {})
    number = call.numbers if call.list_op.numbers else call.numbers[0]
    if call.list_op.as_tensors:
        described = form(first)
        assert described is not None
        number = NumberTensors(number, described.dtype)
    if call.list_op.named:
        return Invocation(call.list_op.op, tuple(lists), {call.list_op.named: number})
    return Invocation(call.list_op.op, (*lists, number), {})


class _Variables:
    """The names that values have in a tail: one that is written in place keeps that of the memory it is written into."""

    def __init__(self, into: Mapping[fx.Node, fx.Node]) -> None:
        self._into = into

    def of(self, item: fx.Node) -> str:
        """The name of a value."""
        while item in self._into:
            item = self._into[item]
        return item.name

    def text(self, item: Any) -> str:
        """An argument as text."""
        if isinstance(item, list):
            return f"[{', '.join(map(self.text, item))}]"
        if isinstance(item, NumberTensors):
            return item.text(self.text(item.numbers))
        return self.of(item) if isinstance(item, fx.Node) else spell_value(item)

    def frees(self, calls: Sequence[TailCall], kept: Iterable[str]) -> list[list[str]]:
        """For each call the names of what nothing needs after it."""
        last: dict[str, int] = {}
        for index, call in enumerate(calls):
            for op in call.ops:
                last |= {self.of(item): index for item in (op, *held_for(op))}
        dead: list[list[str]] = [[] for _ in calls]
        for name, index in last.items():
            if name not in kept:
                dead[index].append(name)
        return dead


def _listed(nodes: Iterable[fx.Node]) -> str:
    return f"[{', '.join(node.name for node in nodes)}]"


def _fits(schedule: Schedule) -> str:
    """A comparison that no number passes which an op may refuse, nor all that are infinite or no number."""
    if not schedule.numbers:
        return "True"
    numbers = f"({', '.join(node.name for node in schedule.numbers)},)"
    return f"min({numbers}) >= {-schedule.largest!r} and max({numbers}) <= {schedule.largest!r}"
