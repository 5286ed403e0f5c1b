"""The end of a step in which processes give each other the state that each has updated a part of."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import fx

from monograph.distributed.programs.begun import MOVES
from monograph.distributed.programs.collectives import awaited_by, begins_collective
from monograph.ir.meta import compute_nodes, form, is_late, output_nodes
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.plan.alias import Aliases
from monograph.plan.updates.counterparts import op_in_place
from monograph.plan.updates.failing import is_arithmetic

_COPY: Final = torch.ops.aten.copy.default


def exchange(program: Program) -> tuple[fx.Node, ...]:
    """The collectives that lead to new state alone, with what they need besides arithmetic, and all that needs them.

    In the order in which they may run once the updates are done: collectives as in the program, each begun before the one
    before it is waited for, and each piece of state as soon as it is there.
    """
    begun = [node for node in program.ops() if begins_collective(node) and is_late(node)]
    if not begun:
        return ()
    output = program.graph.output_node()
    ports = zip(output_nodes(program.graph), program.outputs, strict=True)
    results = {item for item, port in ports if port.role is not Role.STATE}
    late = set[fx.Node]()
    for node in reversed(list(compute_nodes(program.graph))):
        leads = bool(node.users) and all(reader in late or reader is output for reader in node.users)
        if leads and node not in results and _may_be_late(node):
            late.add(node)
    found = {node for node in begun if node in late and _sends_new_state(node, late)}
    for node in compute_nodes(program.graph):
        if node in late and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    for node in reversed(list(compute_nodes(program.graph))):
        if node in late and not _is_arithmetic(node) and found.issuperset(node.users):
            found.add(node)
    return tuple(_in_order([node for node in compute_nodes(program.graph) if node in found]))


def _sends_new_state(node: fx.Node, late: Container[fx.Node]) -> bool:
    """True if what a collective sends was made by updates, and not by backward."""
    return all(
        item in late and (_sends_new_state(item, late) if item.target in MOVES else is_late(item))
        for item in node.all_input_nodes
    )


def _may_be_late(node: fx.Node) -> bool:
    if begins_collective(node) or awaited_by(node) is not None:
        return is_late(node)
    return node.target in MOVES or node.target is _COPY or _is_arithmetic(node)


def _is_arithmetic(node: fx.Node) -> bool:
    described = form(node)
    return described is not None and node.target not in MOVES and is_arithmetic(node, described)


def _in_order(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    inside, done = set(nodes), set[fx.Node]()
    begins = [node for node in nodes if begins_collective(node)]

    def with_sources(node: fx.Node) -> Iterator[fx.Node]:
        if node in done or node not in inside:
            return
        done.add(node)
        if (collective := awaited_by(node)) in begins:
            for begin in begins[: begins.index(collective) + 2]:
                yield from with_sources(begin)
        for source in node.all_input_nodes:
            yield from with_sources(source)
        yield node

    for node in nodes:
        if not inside.issuperset(node.users):
            yield from with_sources(node)


def reads(node: fx.Node) -> list[fx.Node]:
    """The values of which an op reads the numbers."""
    return [*node.all_input_nodes[1:]] if node.target is _COPY else node.all_input_nodes


def written_last(
    ops: Sequence[fx.Node], state: Mapping[int, fx.Node], outputs: Sequence[object], memory: Aliases
) -> dict[int, fx.Node]:
    """By position the outputs that ops of an exchange may write into the state that they replace."""
    place = {op: index for index, op in enumerate(ops)}
    found = {}
    for index, old in state.items():
        new = outputs[index]
        if isinstance(new, fx.Node) and new in place and new.args and new.args[0] is old:
            own = memory.possible[old.name]
            later = [
                item for op in ops[place[new] :] for item in reads(op) if item is not old or op is not new
            ]
            fits = form(new) == form(old) and op_in_place(new.target) is not None
            if fits and all(own.isdisjoint(memory.possible[item.name]) for item in later):
                found[index] = new
    return found


def parts_sent(
    ops: Sequence[fx.Node], tail: Container[fx.Node], memory: Aliases
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The new values of parts of state that an exchange sends, each with the old one, which nothing in it reads."""
    read = {item for op in ops for item in reads(op)}
    kept = {shown for item in read if item not in tail for shown in memory.possible[item.name]}
    for new in [node for node in dict.fromkeys(item for op in ops for item in reads(op)) if node in tail]:
        old = new
        while old in tail and old.args and isinstance(old.args[0], fx.Node):
            old = old.args[0]
        if old.name in memory.views and kept.isdisjoint(memory.possible[old.name]):
            yield new, old
