"""A program with a tail as Python text: what runs first, the tail in place, and the tail with new state apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from monograph.backends.entries import Invocation
from monograph.ir.meta import form, output_nodes
from monograph.ir.printer import Spell, function_code, spell_value
from monograph.plan.counterparts import NumberTensors, op_in_place
from monograph.plan.groups import TailCall, early_calls_of
from monograph.plan.plan import Plan
from monograph.plan.tail import Tail

RUN, UPDATE, APART = "run", "update", "tail_apart"
_FIRST, _IN_PLACE = "first_part", "tail_in_place"
_RUN = f"""\
def {RUN}(inputs):
    if num_dispatch_modes() or profiler_is_on():
        return watched(inputs)
    try:
        with without_functions():
            fits, values = {_FIRST}(*inputs)
        return values if fits else apart(values, inputs)
    except Exception as error:
        raise noted(error)
"""
_UPDATE = f"""\
def {UPDATE}(values):
    begun[0] = True
    try:
        with without_functions():
            outputs = {_IN_PLACE}(values) if type(values) is list else copied(values)
    except Exception as error:
        raise noted(error)
    begun[0] = False
    return outputs
"""


class TailCode:
    """The lines of functions, and by the numbers of lines, from 0, the ops that they call in a tail.

    `run(inputs)` runs all but the tail, and gives a list of what that needs. `update(values)` runs the tail, empties the list,
    and gives the outputs: None for those that are in the state. `tail_apart(values)` changes nothing but the list.

    They ask for functions by name. `apart(values, inputs)` runs a tail that may fail, since a number does not fit into its
    type, and `watched(inputs)` the program where somebody looks at its ops; `copied` writes what the two have made.
    """

    def __init__(
        self, plan: Plan, tail: Tail, calls: Sequence[TailCall], spell: Spell, names: Collection[str]
    ) -> None:
        self.lines: list[str] = []
        self.ops: dict[int, fx.Node] = {}
        self._spell, self._outputs = spell, output_nodes(plan.program.graph)
        read = [item for op in tail.ops for item in op.all_input_nodes]
        returned = [item for item in self._outputs if isinstance(item, fx.Node)]
        last = set(tail.ops)
        self._needed = list(dict.fromkeys(item.name for item in (*read, *returned) if item not in last))
        if RUN in names:
            self._write_first(plan, tail)
            self.lines += _RUN.splitlines()
        if UPDATE in names:
            self._write_tail(_IN_PLACE, calls, tail.into, tail.written)
            self.lines += _UPDATE.splitlines()
        if APART in names:
            self._write_tail(APART, [TailCall((op,)) for op in tail.ops], {}, frozenset())

    def _write_first(self, plan: Plan, tail: Tail) -> None:
        needed = set(self._needed)
        dead = {op: [item for item in items if item not in needed] for op, items in plan.frees.items()}
        instead = dict.fromkeys(tail.ops, "")
        for call in early_calls_of(tail):
            instead |= dict.fromkeys(call.ops, "")
            instead[call.ops[0]] = self._call(call, {}, _Variables({}))
        self.lines += function_code(
            _FIRST,
            plan.program.graph,
            spell=self._spell,
            frees=dead,
            instead=instead,
            returned=f"{_fits(tail)}, [{', '.join(self._needed)}]",
        )

    def _write_tail(
        self, name: str, calls: Sequence[TailCall], into: Mapping[fx.Node, fx.Node], written: Iterable[int]
    ) -> None:
        variables = _Variables(into)
        self.lines += [
            f"def {name}(values):",
            f"    {', '.join(self._needed)}, = values",
            "    values.clear()",
        ]
        returned = [None if i in written else item for i, item in enumerate(self._outputs)]
        kept = {variables.of(item) for item in returned if isinstance(item, fx.Node)}
        frees = variables.frees(calls, kept)
        for call, dead in zip(calls, frees, strict=True):
            self.ops[len(self.lines)] = call.ops[0]
            self.lines.append(f"    {self._call(call, into, variables)}")
            if dead:
                self.lines.append(f"    del {', '.join(dead)}")
        self.lines.append(f"    return [{', '.join(map(variables.text, returned))}]")

    def _call(self, call: TailCall, into: Mapping[fx.Node, fx.Node], variables: _Variables) -> str:
        made = "" if call.ops[0] in into else f"{', '.join(op.name for op in call.ops)} = "
        target, args, kwargs = invocation(call, in_place=call.ops[0] in into)
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
                last |= {self.of(item): index for item in (op, *op.all_input_nodes)}
        dead: list[list[str]] = [[] for _ in calls]
        for name, index in last.items():
            if name not in kept:
                dead[index].append(name)
        return dead


def _fits(tail: Tail) -> str:
    """A comparison that no number passes which an op may refuse, nor all that are infinite or no number."""
    if not tail.numbers:
        return "True"
    numbers = f"({', '.join(node.name for node in tail.numbers)},)"
    return f"min({numbers}) >= {-tail.largest!r} and max({numbers}) <= {tail.largest!r}"
