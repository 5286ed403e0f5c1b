"""Programs in which chains of element-wise ops are one op each, which is where the last of them was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import replace
from itertools import chain as joined
from typing import Any

from torch import fx

from monograph.backends.python.generated import Generated, generated
from monograph.compat.ops import named_input
from monograph.elementwise.chain_calls import call_of, has_eagers_bits
from monograph.elementwise.chain_code import ChainCode
from monograph.elementwise.chains import Chain, chains_of
from monograph.ir.meta import come_from, set_value, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.plan.alias import Aliases
from monograph.plan.lifetime import frees
from monograph.plan.memory import peak_of, timeline_of
from monograph.plan.plan import Plan

Function = Callable[..., Any]


def chains_in(plan: Plan, holds: Callable[[fx.Node], bool]) -> list[Chain]:
    """The chains of a plan that are worth a loop each, without those for which more memory would be held than before."""
    chains = chains_of(plan.program, holds)
    if not chains:
        return []
    memory, inside = plan.aliases, {part.program.name: part.memory for part in plan.parts}
    most = peak_of(timeline_of(plan.program, plan.frees, memory, inside)).running_bytes
    places = {node.name: place for place, node in enumerate(plan.program.graph.nodes)}
    while chains:
        program = _with_calls(plan.program, dict.fromkeys(chains, _placed))
        dead, shown = frees(program.graph), _aliases_of(program, memory)
        peak = peak_of(timeline_of(program, dead, shown, inside))
        if peak.running_bytes <= most:
            break
        place = places.get(peak.node.removeprefix(_PREFIX), -1)
        others = [
            item for item in chains if not places[item.nodes[0].name] <= place <= places[item.nodes[-1].name]
        ]
        chains = others if len(others) < len(chains) else []
    return chains


def _placed() -> None:
    """Stands for the calls of chains where nothing but their place matters."""


def with_chains(plan: Plan, codes: Sequence[ChainCode], library: CDLL) -> tuple[Plan, dict[Chain, Function]]:
    """The plan with a call for each chain that has eager's bits, and what they call."""
    proved = dict[str, bool]()
    calls = dict[Chain, Function]()
    for code in codes:
        if code.name not in proved:
            proved[code.name] = has_eagers_bits(code, library)
        if proved[code.name]:
            calls[code.chain] = call_of(code, library, _OpByOp(plan, code.chain))
    program = _with_calls(plan.program, calls)
    return replace(plan, program=program, frees=frees(program.graph), in_place={}), calls


class _OpByOp:
    """Runs the ops of a chain one by one; the text is made when it is needed."""

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self._plan, self._chain = plan, chain
        self._made: Generated | None = None

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        if self._made is None:
            self._made = generated(self._planned(), quick=True)
        return self._made(given)

    def _planned(self) -> Plan:
        chain, graph, new = self._chain, fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*chain.tensors, *chain.numbers):
            new[node] = named_input(graph, node.name)
            new[node].meta = dict(node.meta)
        for node in chain.nodes:
            new[node] = copied(graph, node, new)
        graph.output(tuple(new[node] for node in chain.results))
        inputs = tuple(Port(node.name, Role.PROBE, node.name) for node in graph.find_nodes(op="placeholder"))
        program = replace(self._plan.program.with_graph(graph), inputs=inputs, outputs=())
        return replace(self._plan, program=program, frees=frees(graph), in_place={})


def copied(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A node of another graph here, with all that is known of it."""
    made = graph.node_copy(node, new.__getitem__)
    made.meta = dict(node.meta)
    return made


_PREFIX = "chain_of_"


def _with_calls(program: Program, calls: Mapping[Chain, Function]) -> Program:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = set(joined.from_iterable(item.nodes for item in calls))
    last = {item.nodes[-1]: item for item in calls}
    for node in program.graph.nodes:
        if node in last:
            new |= _emitted(graph, last[node], calls[last[node]], new)
        elif node not in inside:
            new[node] = copied(graph, node, new)
    return program.with_graph(graph)


def _emitted(
    graph: fx.Graph, chain: Chain, call: Function, new: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The call of a chain, and its results."""
    last, args = chain.nodes[-1], tuple(new[node] for node in (*chain.tensors, *chain.numbers))
    if len(chain.results) == 1:
        (result,) = chain.results
        made = graph.create_node("call_function", call, args, name=result.name)
        made.meta = dict(result.meta)
        return {result: made}
    made = graph.create_node("call_function", call, args, name=f"{_PREFIX}{last.name}")
    come_from(made, last)
    set_value(made, tuple(value(node) for node in chain.results))
    found = dict[fx.Node, fx.Node]()
    for index, node in enumerate(chain.results):
        found[node] = graph.create_node("call_function", operator.getitem, (made, index), name=node.name)
        found[node].meta = dict(node.meta)
    return found


def _aliases_of(program: Program, memory: Aliases) -> Aliases:
    """The memory of values that a program had before its chains became calls."""
    several = {
        node.name: frozenset(joined.from_iterable(memory.certain[user.name] for user in node.users))
        for node in _computed(program)
        if node.name not in memory.certain
    }
    return replace(memory, certain={**memory.certain, **several}, possible={**memory.possible, **several})


def _computed(program: Program) -> Iterable[fx.Node]:
    return (node for node in program.graph.nodes if node.op == "call_function")
