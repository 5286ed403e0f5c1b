"""The tail of a program: the ops at its end that lead to new state alone and cannot fail; where each may write."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import fx

from monograph.compat.ops import OpOverload, is_custom, schema_arguments
from monograph.ir.memory import Groups
from monograph.ir.meta import TensorMeta, compute_nodes, form, metas, output_nodes, value
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.plan.alias import Aliases, Storage
from monograph.plan.layouts import certain_layouts
from monograph.plan.overwrite import sources_of
from monograph.plan.plan import Plan
from monograph.plan.updates.counterparts import op_in_place
from monograph.plan.updates.exchange import exchange, parts_sent, written_last
from monograph.plan.updates.failing import is_arithmetic, largest_of, numbers_of
from monograph.plan.updates.fused import FusedUpdate, fused_updates

_NEGATED: Final = torch.ops.aten._neg_view.default


@dataclass(frozen=True)
class Tail:
    """Ops that may run after all others, in the program's order.

    `into` has for each op that writes in place its first argument, whose memory it writes into; for a fused update one of its
    tensors, and for what is taken from it the one that it is now. The outputs at the positions `written` are then in the
    memory of the state that they replace. `families` are the ops once more, those together that depend on each other or
    share memory: families may run in any order. What only takes fused updates apart is in none of them. The ops take all
    values, as long as none of `numbers` is finite and larger than `largest`.

    `early` are ops before the tail that make single numbers out of state and constants, such as step counters: they may run
    at any time before it.
    """

    ops: tuple[fx.Node, ...]
    into: Mapping[fx.Node, fx.Node]
    written: frozenset[int]
    families: tuple[tuple[fx.Node, ...], ...]
    numbers: tuple[fx.Node, ...]
    largest: float
    early: tuple[fx.Node, ...]
    exchange: tuple[fx.Node, ...] = ()  # what runs last, and can fail if another process does

    def on(self, program: Program) -> Tail:
        """The same of a program that has these values by the same names."""
        named = {node.name: node for node in program.graph.nodes}

        def those(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
            return tuple(named[node.name] for node in nodes)

        return replace(
            self,
            ops=those(self.ops),
            into={named[op.name]: named[item.name] for op, item in self.into.items()},
            families=tuple(map(those, self.families)),
            numbers=those(self.numbers),
            early=those(self.early),
            exchange=those(self.exchange),
        )


def tail_of(plan: Plan, positions: Collection[int]) -> Tail | None:
    """The tail, if it can write some of the outputs at these positions into the state that they replace."""
    program, memory = plan.program, plan.aliases
    places = {index: place for index, place in plan.in_place.items() if index in positions}
    if not places or _may_negate(program):
        return None
    nodes = {node.name: node for node in program.graph.nodes}
    outputs = output_nodes(program.graph)
    state = {index: nodes[place.input] for index, place in places.items()}
    old = set(state.values())
    known = {node.name for node in program.graph.nodes if node in old or _is_ours(node, program)}
    exchanged = exchange(program)
    last = _last_ops(program, memory, known, frozenset(exchanged))
    fused = list(_fused(plan, state, last, known))
    last |= {item.node for item in fused}
    ops = [node for node in compute_nodes(program.graph) if node in last]
    writes = _Writes(program.graph, memory, ops)
    written = {index for index, item in state.items() if writes.into_state(outputs[index], item)}
    for update in fused:
        writes.into_lists(update)
        written |= set(update.positions)
    own = {shown for item in old for shown in memory.certain[item.name]}
    for new, part in parts_sent(exchanged, set(ops), memory):
        if own.issuperset(memory.possible[part.name]):
            writes.into_state(new, part)
    families = tuple(family for family in writes.families(ops) if not writes.chained.isdisjoint(family))
    kept = {op for family in families for op in family}
    if not kept:
        return None
    writes.into_temporaries([op for op in ops if op in kept])
    late = written_last(
        exchanged, {i: item for i, item in state.items() if i not in written}, outputs, memory
    )
    writes.into |= {new: state[index] for index, new in late.items()}
    numbers = [item for op in ops if op in kept for item in numbers_of(op)]
    whole = kept | {op for item in fused for op in item.taken}
    return Tail(
        tuple(op for op in compute_nodes(program.graph) if op in whole),
        writes.into,
        frozenset((*written, *late)),
        families,
        tuple(dict.fromkeys(numbers)),
        min(map(largest_of, {meta.dtype for op in kept for meta in metas(value(op))})),
        tuple(_early_ops(program, kept, old)),
        exchanged,
    )


# --- which ops -------------------------------------------------------------------------------------------------------


def _may_negate(program: Program) -> bool:
    """True if tensors may be negated by a bit, which ops on lists do not take: views of complex ones are."""
    return any(
        node.target is _NEGATED or any(meta.dtype.is_complex for meta in metas(value(node)))
        for part in program.programs
        for node in part.graph.nodes
    )


def _last_ops(program: Program, memory: Aliases, known: Set[str], exchanged: Set[fx.Node]) -> set[fx.Node]:
    """Ops that take all values and lead to new state alone, through such ops or an exchange. They work on memory that is known."""
    output = program.graph.output_node()
    ports = zip(output_nodes(program.graph), program.outputs, strict=True)
    results = {item for item, port in ports if port.role is not Role.STATE}

    def is_last(node: fx.Node) -> bool:
        described = form(node)
        return (
            described is not None
            and bool(node.users)
            and node not in results
            and node not in exchanged
            and all(reader in found or reader in exchanged or reader is output for reader in node.users)
            and (len(node.users) == 1 or bool(described.shape))  # a number for many would tie them together
            and _takes_all_values(node, described)
            and _works_on(known, node, memory)
        )

    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if is_last(node):
            found.add(node)
    return found


def _works_on(known: Set[str], node: fx.Node, memory: Aliases) -> bool:
    """True if an op is given nothing but the memory of such values."""
    return all(shown.maker in known for item in node.all_input_nodes for shown in memory.possible[item.name])


def _fused(
    plan: Plan, state: Mapping[int, fx.Node], ops: Set[fx.Node], known: Set[str]
) -> Iterator[FusedUpdate]:
    """The fused updates that may be ops of a tail with these others: none of those is given what they write."""
    memory = plan.aliases.possible
    read = {storage for op in ops for item in op.all_input_nodes for storage in memory[item.name]}
    for update in fused_updates(plan.program, state, plan.aliases):
        alone = all(read.isdisjoint(memory[item.name]) for item in update.into.values())
        if alone and _works_on(known, update.node, plan.aliases):
            yield update


def _early_ops(program: Program, last: Set[fx.Node], state: Set[fx.Node]) -> Iterator[fx.Node]:
    for node in compute_nodes(program.graph):
        described, read = form(node), set(node.all_input_nodes)
        single = described is not None and not described.shape and _takes_all_values(node, described)
        if single and node not in last and read and read <= state:
            yield node


def _is_ours(node: fx.Node, program: Program) -> bool:
    """True for values that ops of torch have made; others may give anything."""
    if node.op == "call_module":
        return not any(is_custom(inner.target) for part in program.parts for inner in part.ops())
    return isinstance(node.target, OpOverload) and not is_custom(node.target)


def _takes_all_values(node: fx.Node, described: TensorMeta) -> bool:
    """True for arithmetic on floats alone."""
    tensors = (meta for item in node.all_input_nodes for meta in metas(value(item)))
    floats = all(meta.dtype.is_floating_point for meta in (described, *tensors))
    return floats and 0 not in described.shape and is_arithmetic(node, described)


# --- where they write ------------------------------------------------------------------------------------------------


class _Writes:
    """Finds for ops the memory that they may write into. They run in the program's order, after all others."""

    def __init__(self, graph: fx.Graph, memory: Aliases, ops: Sequence[fx.Node]) -> None:
        self._memory, self._ops = memory, set(ops)
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._sure = certain_layouts(graph)
        self._makers = {node.name: node for node in graph.nodes}
        self._returned = {item for item in output_nodes(graph) if isinstance(item, fx.Node)}
        self._readers: dict[Storage, list[fx.Node]] = {}
        for op in ops:
            for item in op.all_input_nodes:
                for storage in memory.possible[item.name]:
                    self._readers.setdefault(storage, []).append(op)
        self.into: dict[fx.Node, fx.Node] = {}
        self.chained: set[fx.Node] = set()  # ops that write into state

    def into_state(self, new: fx.Node, old: fx.Node) -> bool:
        """Let the ops that lead from old state to new, each from its first argument, write into the old one."""
        chain = [new]
        while (source := self._replaced(chain[-1])) is not old:
            if source is None or source not in self._ops or source in self._returned:
                return False
            chain.append(source)
        if any(len(op.args) == 1 for op in chain):  # functions of the math library may look at the alignment
            return False
        self.into |= {op: op.args[0] for op in chain}  # type: ignore[misc]
        self.chained.update(chain)
        return True

    def into_lists(self, update: FusedUpdate) -> None:
        """Let a fused update write into what it is given."""
        self.into |= {update.node: next(iter(update.into.values())), **update.into}
        self.chained.add(update.node)

    def into_temporaries(self, ops: Sequence[fx.Node]) -> None:
        """Let ops write into what other ops have made and nothing else reads any more, such as gradients."""
        kept = self.chained | self._returned
        for op in ops:
            source = self._replaced(op) if op not in self.into else None
            if source is None or source in kept:
                continue
            if source in self._ops or self._is_left_to(op, source):
                self.into[op] = source

    def _is_left_to(self, op: fx.Node, source: fx.Node) -> bool:
        """True for what an op before the tail has made, if the caller does not get it. When its last reader has run is seen to later."""
        if source not in sources_of(op, self._memory, self._makers, self._sure):
            return False
        shown = self._memory.possible[source.name]
        return all(shown.isdisjoint(self._memory.possible[item.name]) for item in self._returned)

    def _replaced(self, op: fx.Node) -> fx.Node | None:
        """The first argument of an op, if it may be written over: it has the form of the result, and is read no more."""
        source = op.args[0] if op in self._ops and op.args else None
        if not isinstance(source, fx.Node) or op_in_place(op.target) is None:
            return None
        if form(source) != form(op) or _times(op, source) != 1 or _may_round_its_number(op):
            return None
        shown = self._memory.possible[source.name]
        others = [item for item in op.all_input_nodes if item is not source]
        if any(shown & self._memory.possible[item.name] for item in others):
            return None
        readers = {reader for storage in shown for reader in self._readers[storage]}
        return source if max(readers, key=self._order.__getitem__) is op else None

    def families(self, ops: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
        """The ops, those together that read what another of them makes, or memory that it writes into."""
        written = {storage for op in self.into for storage in self._memory.certain[self.into[op].name]}
        makers = {storage: op for op in ops for storage in self._memory.certain[op.name]}
        groups = [readers for storage, readers in self._readers.items() if storage in written]
        groups += [
            [makers[storage], *readers] for storage, readers in self._readers.items() if storage in makers
        ]
        together = Groups()
        for start, *others in groups:
            for op in others:
                together.join(op, start)
        return list(map(tuple, together.sorted(ops)))


def _may_round_its_number(op: fx.Node) -> bool:
    """True for ops on a half type and a number: in place, products round that to the type first."""
    described = form(op)
    arguments = schema_arguments(op.target)
    return (
        described is not None and described.is_half and len(arguments) > 1 and arguments[1].kind != "Tensor"
    )


def _times(op: fx.Node, source: fx.Node) -> int:
    """How often an op gets a value."""
    return sum(item is source for item in (*op.args, *op.kwargs.values()))
