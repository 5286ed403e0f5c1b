"""Inputs that neither an op of the recorded step nor a condition on numbers reads, and unread copies: they are taken away.

And ints that cannot be inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import Any

from torch import fx

from monograph.capture.effects.python_objects.counters import Counters, Uncounted
from monograph.capture.numbers.arithmetic import Condition
from monograph.capture.numbers.moving import Node, is_moving
from monograph.capture.numbers.taken import BOUND, ValuesTaken
from monograph.capture.tensors.fakes import Input, Inputs
from monograph.capture.tensors.readings import Readings
from monograph.compat.symbolic_numbers import recorded_conditions
from monograph.compat.traces.nodes import traced_node
from monograph.ir.call.signature import Call
from monograph.ir.graph_signature import Argument, Counted
from monograph.ir.port import Role
from monograph.user_code.lines import Origin


class NumberConditions:
    """The conditions on numbers under which a step does what was recorded."""

    def __init__(self, inputs: Inputs, readings: Readings) -> None:
        self._inputs, self._readings = inputs, readings
        self.branches: list[Condition] = []  # taken in Python
        self.unraised: list[Condition] = []  # that arithmetic of the program does not raise

    def note(self, graph: fx.Graph) -> None:
        """Those of a recorded graph."""
        moving, checked = self._inputs.moving, {*self._inputs.symbols, *self._readings.symbols}
        self.branches = recorded_conditions(self._inputs.mode) + moving.conditions(graph)
        self.unraised = moving.unraised(graph, checked)

    def note_later(self, sizes: Collection[str]) -> None:
        """Those on sizes with these names that were decided on since: by what looks at the recorded graph, and by what makes a program of it."""
        found = self._inputs.moving.branches.texts.items() if sizes else ()
        self.branches += [
            (text, names)
            for text, names in found
            if (text, names) not in self.branches and all(name in sizes for name in names)
        ]

    def names(self) -> set[str]:
        """The names of numbers in them."""
        return {name for _, names in (*self.branches, *self.unraised) for name in names}


def check_ints(
    graph: fx.Graph, inputs: Inputs, conditions: NumberConditions, call: Call, *, plain: bool
) -> None:
    """Raise ValuesTaken for ints of a call that were to move, where Python takes their very values.

    Unless it runs op by op, as `plain` says, a program that reads them does so for those alone that compiled code has the
    bits for.
    """
    moving = inputs.moving
    taken = dict[int, Origin]()
    bounded = False
    for item, node in zip(inputs.items, graph.find_nodes(op="placeholder"), strict=True):
        if not isinstance(item.source, Argument) or call.keys[item.source.index] is not int:
            continue
        number: Node = item.fake.node
        if number.name in moving.taken:
            taken[item.source.index] = moving.taken[number.name].where
        elif node.users and not plain:
            if moving.too_wide or abs(number.value) > BOUND:
                taken[item.source.index] = Origin()
            number.need(f"-{BOUND} <= {{}} <= {BOUND}")
            bounded = True
    if taken:
        raise ValuesTaken(taken)
    if bounded:
        conditions.note(graph)


def drop_unread_copies(graph: fx.Graph, inputs: Inputs, tracer: Any) -> None:
    """Of a tensor whose number Python has read a copy is there, for places outside that the number may get into."""
    for node in [traced_node(copy, tracer) for copy in inputs.read_out.values()]:
        if node is not None and not node.users:
            graph.erase_node(node)


def drop_unread_numbers(
    graph: fx.Graph, inputs: Inputs, readings: Readings, numbers: Counters, conditions: NumberConditions
) -> None:
    """A counter that no op and no branch reads is no input: it is moved beside the program."""
    if not numbers.leaves:
        return
    nodes = graph.find_nodes(op="placeholder")
    if inputs.moving.too_wide:
        raise Uncounted("a product")
    used = {
        str(item.fake.node.name)
        for item, node in zip(inputs.items, nodes, strict=True)
        if is_moving(item.fake) and (node.users or id(item) in readings.inputs_read)
    }
    kept = numbers.bind(used | conditions.names())
    conditions.note(graph)
    unread = [isinstance(i.source, Counted) and i.fake.node.name not in kept for i in inputs.items]
    _drop(inputs, nodes, unread)


def drop_unasked_state(
    graph: fx.Graph,
    inputs: Inputs,
    readings: Readings,
    is_unasked: Callable[[Input], bool],
    conditions: NumberConditions,
) -> None:
    """State that the step did not ask for is no input: that of a parameter without a gradient."""
    nodes = graph.find_nodes(op="placeholder")
    decided = conditions.names()

    def is_gone(item: Input, node: fx.Node) -> bool:
        if item.role is not Role.OPTIM or not is_unasked(item):
            return False
        moving = is_moving(item.fake) and item.fake.node.name in decided
        return not (node.users or moving or id(item) in readings.inputs_read)

    _drop(inputs, nodes, list(map(is_gone, inputs.items, nodes)))


def _drop(inputs: Inputs, nodes: Sequence[fx.Node], gone: Sequence[bool]) -> None:
    for node in compress(nodes, gone):
        node.graph.erase_node(node)
    inputs.items = [item for item, lost in zip(inputs.items, gone, strict=True) if not lost]
    inputs.symbols = {item.fake.node.name: at for at, item in enumerate(inputs.items) if is_moving(item.fake)}
