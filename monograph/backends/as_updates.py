"""Programs in which each compiled update is one op; and the same step op by op, for who looks at ops."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import fx

from monograph.backends.chained import copied
from monograph.backends.python.generated import generated
from monograph.backends.python.two_parts import in_two_parts
from monograph.compat.modes import hidden_from_dispatch_modes, num_dispatch_modes, profiler_is_on
from monograph.elementwise.updates import Update
from monograph.ir.meta import come_from, output_nodes, set_value, value
from monograph.plan.plan import Plan, make_plan
from monograph.plan.updates.schedule import schedule
from monograph.plan.updates.tail import Tail, tail_of
from monograph.runtime.runner import Runner

_NOTHING = Tail((), {}, frozenset(), (), (), math.inf, ())


def with_updates(plan: Plan, updates: Sequence[Update]) -> Plan:
    """A plan in which each update is one op, where the last of its ops was."""
    if not updates:
        return plan
    program = plan.program
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = {node for update in updates for node in update.part.nodes}
    last = {update.part.nodes[-1]: update for update in updates}
    for node in program.graph.nodes:
        if node in last:
            new |= _emitted(graph, last[node], new)
        elif node not in inside and node.op != "output":
            new[node] = copied(graph, node, new)
    graph.output(
        tuple(new[item] if isinstance(item, fx.Node) else item for item in output_nodes(program.graph))
    )
    return make_plan(program.with_graph(graph))


def _emitted(graph: fx.Graph, update: Update, new: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """An update, and its results."""
    results = tuple(update.part.writes)
    name = f"update_of_{results[-1].name}"
    made = graph.create_node(
        "call_function", update, tuple(new[node] for node in update.arguments), name=name
    )
    come_from(made, results[-1])
    set_value(made, tuple(map(value, results)))
    found = dict[fx.Node, fx.Node]()
    for index, node in enumerate(results):
        found[node] = graph.create_node("call_function", operator.getitem, (made, index), name=node.name)
        found[node].meta = dict(node.meta)
    return found


def tail_with_updates(plan: Plan, positions: Collection[int]) -> Tail | None:
    """The tail of a plan, and the updates that are ops of it; None if neither writes anything."""
    updates = [node for node in plan.program.graph.nodes if isinstance(node.target, Update)]
    into: dict[fx.Node, fx.Node] = {}
    for node in updates:
        states = [node.args[place] for place in node.target.written]
        into |= {node: states[0]} | {item: states[item.args[1]] for item in node.users}
    outputs = output_nodes(plan.program.graph)
    written = {position for position, item in enumerate(outputs) if item in into}
    tail = tail_of(plan, set(positions) - written) or _NOTHING
    if _reads_any(tail, plan, into.values()):
        tail = _NOTHING
    if not tail.families and not updates:
        return None
    ops = {*tail.ops, *into}
    return replace(
        tail,
        ops=tuple(node for node in plan.program.graph.nodes if node in ops),
        into={**tail.into, **into},
        written=tail.written | written,
        families=(*tail.families, *((node,) for node in updates)),
    )


def _reads_any(tail: Tail, plan: Plan, states: Collection[fx.Node]) -> bool:
    """True if a tail reads state that updates write."""
    memory = plan.aliases.possible
    written = {storage for state in states for storage in memory[state.name]}
    return any(not written.isdisjoint(memory[item.name]) for op in tail.ops for item in op.all_input_nodes)


@dataclass(frozen=True)
class _OpByOp:
    """What the first part of a step gives that runs op by op, and what the step was given."""

    values: Any
    inputs: Sequence[Any]


class Watched:
    """A step of compiled code op by op, for as long as somebody looks at ops."""

    values_type: Final = _OpByOp  # of what `run` gives

    def __init__(self, plan: Plan, written: frozenset[int], at_once: bool) -> None:
        self._plan, self._written, self._at_once = plan, written, at_once
        places = {port.path: place for place, port in enumerate(plan.program.inputs)}
        self._states = {position: places[plan.program.outputs[position].path] for position in sorted(written)}

    def around(self, compiled: Runner) -> Runner:
        """A step that writes nothing itself, with this one in its place while somebody looks."""

        def run(inputs: list[Any]) -> Sequence[Any]:
            if num_dispatch_modes() or profiler_is_on():
                return self.update(self.run(inputs))
            return compiled.run(inputs)

        return replace(compiled, run=run)

    @cached_property
    def _plain(self) -> Runner:
        tail = tail_of(self._plan, self._written)
        if tail is None:
            return Runner(generated(self._plan))
        return in_two_parts(schedule(self._plan, tail, at_once=self._at_once))

    def run(self, inputs: list[Any]) -> _OpByOp:
        """The first part."""
        return _OpByOp(self._plain.run(inputs), inputs)

    def update(self, made: _OpByOp) -> Sequence[Any]:
        """The second part: outputs, None for those that are in the state."""
        update = self._plain.update
        outputs = list(made.values if update is None else update(made.values))
        left = [position for position in self._states if position not in self._plain.written]
        if left:
            with hidden_from_dispatch_modes():
                states = [made.inputs[self._states[position]] for position in left]
                torch._foreach_copy_(states, [outputs[position] for position in left])
        for position in left:
            outputs[position] = None
        return outputs

    def has_begun(self) -> bool:
        """True if the state may have changed in a run that has just failed."""
        begun = self._plain.has_begun if "_plain" in vars(self) else None
        return begun is not None and begun()
