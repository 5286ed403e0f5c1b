"""Which new state may be written into the memory of the state it replaces, and from when on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import fx

from monograph.ir.meta import form, output_nodes
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.plan.alias import Aliases, Form, Shown, Storage
from monograph.plan.lifetime import lifetimes


@dataclass(frozen=True, slots=True)
class InPlace:
    """New state that may be copied into the memory of `input`: right after the node `early`, or any time later.

    `made` is the node that makes it. The two are one where nothing reads the old value any more at that moment.
    """

    input: str
    made: str
    early: str


def in_place(program: Program, memory: Aliases) -> Mapping[int, InPlace]:
    """By position the outputs that may replace the input of their path.

    What the plan cannot see: that the caller copies this output into this very tensor, and that no other input shares
    memory with it.
    """
    order = {node.name: index for index, node in enumerate(program.graph.nodes)}
    lives = lifetimes(program.graph, memory)
    returned = _Returned(memory.outputs)
    found: dict[int, InPlace] = {}
    for index, new, old in _pairs(program):
        (own,) = memory.certain[old.name]
        if returned.shows(own) or not returned.alone(index):
            continue
        early = max(new.name, lives[own].last_read, key=order.__getitem__)
        found[index] = InPlace(old.name, new.name, early)
    return found


def _pairs(program: Program) -> Iterator[tuple[int, fx.Node, fx.Node]]:
    """Each output that is new state with its position and the input it replaces, if one fits into the other."""
    nodes = program.graph.find_nodes(op="placeholder")
    inputs = {
        port.path: node
        for port, node in zip(program.inputs, nodes, strict=True)
        if port.role is not Role.USER  # arguments may be laid out in ways that no plan knows
    }
    results = output_nodes(program.graph)
    for index, port in program.updates():
        new, old = results[index], inputs.get(port.path)
        if isinstance(new, fx.Node) and old is not None and _fits(new, old):
            yield index, new, old


def _fits(new: fx.Node, old: fx.Node) -> bool:
    before = form(old)
    if before is None or form(new) != before:
        return False
    return all(stride for size, stride in zip(before.shape, before.stride, strict=True) if size > 1)


class _Returned:
    """How many outputs show, or may show, each storage."""

    def __init__(self, outputs: Sequence[Form]) -> None:
        self._outputs = [form.possible if isinstance(form, Shown) else frozenset() for form in outputs]
        self._count: dict[Storage, int] = {}
        for storage in chain.from_iterable(self._outputs):
            self._count[storage] = self._count.get(storage, 0) + 1

    def shows(self, storage: Storage) -> bool:
        """True if any output shows it."""
        return storage in self._count

    def alone(self, index: int) -> bool:
        """True if what an output shows is shown by no other."""
        return all(self._count[storage] == 1 for storage in self._outputs[index])
