"""Collectives in a graph: an op that begins one gives what `wait_tensor` waits for, and until then it may read its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem
from typing import Any

from torch import fx

from monograph.compat.distributed.ops import (
    communicates,
    reads_a_copy,
    reads_until_awaited,
    waits,
)
from monograph.ir.meta import computes, form
from monograph.ir.program import Program


def begins_collective(node: fx.Node) -> bool:
    """True for an op that sends, receives or reduces between processes; one that waits for it is another op."""
    return communicates(node.target) and not waits(node.target)


def awaited_by(node: fx.Node) -> fx.Node | None:
    """The collective that an op waits for; None for any other op."""
    if not waits(node.target):
        return None
    source = node.args[0]
    while isinstance(source, fx.Node) and source.target is getitem:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and begins_collective(source) else None


def read_by(node: fx.Node) -> Iterable[fx.Node]:
    """The values that an op reads: one that waits for a collective, those that the collective reads meanwhile, too."""
    awaited = awaited_by(node)
    if awaited is None or not reads_until_awaited(awaited.target):
        return node.all_input_nodes
    return (*node.all_input_nodes, *awaited.all_input_nodes)


def held_for(node: fx.Node) -> Iterable[fx.Node]:
    """The values that must be there while an op runs: what it reads, but for that of which a collective has a copy."""
    awaited = awaited_by(node)
    return node.all_input_nodes if awaited is not None and has_a_copy(awaited) else read_by(node)


def has_a_copy(collective: fx.Node) -> bool:
    """True for a collective that needs what it is given no longer than the op that begins it."""
    made = form(collective)
    return made is not None and reads_a_copy(collective.target, made.device.type)


def collectives_in_order(program: Program) -> Iterator[fx.Node]:
    """The ops that begin the collectives of a step, as they begin; those of a part as often as it is called."""
    parts = {part.name: part for part in program.parts}
    for node in filter(computes, program.graph.nodes):
        if node.op == "call_module" and node.target in parts:
            yield from collectives_in_order(parts[str(node.target)])
        elif begins_collective(node):
            yield node


def calls_in_order(program: Program) -> Iterator[Any]:
    """The same, each as its op with its numbers and its group."""
    for node in collectives_in_order(program):
        yield node.target, tuple(item for item in node.args if isinstance(item, (str, int)))


def groups_in(program: Program) -> list[str]:
    """The names of the groups that a step has collectives in, in order."""
    named = (numbers[-1] for _, numbers in calls_in_order(program))
    return [name for name in dict.fromkeys(named) if isinstance(name, str)]
