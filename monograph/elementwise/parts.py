"""What of a program computes new state element by element, and nothing else: the update of each parameter."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_arguments, schema_arguments
from monograph.elementwise.formulas import CALLED, FORMULAS, NUMBERS
from monograph.ir.memory import Groups, is_view, shown_values
from monograph.ir.meta import ScalarMeta, TensorMeta, form, output_nodes, value
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.layout import fills_a_block
from monograph.plan.alias import Aliases, Storage
from monograph.plan.plan import Plan

READ = torch.ops.aten._local_scalar_dense.default
_PROMISES = frozenset(
    getattr(torch.ops.aten, name).default for name in ("_neg_view", "_conj", "_efficientzerotensor")
)
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    """Ops that hang together, in the order of the program, and the state that each result is written into."""

    nodes: tuple[fx.Node, ...]
    writes: Mapping[fx.Node, fx.Node]

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What comes from outside, in the order of its first use."""
        inside = set(self.nodes)
        used = (given for node in self.nodes for given in node.all_input_nodes)
        return tuple(dict.fromkeys(node for node in used if node not in inside))

    @cached_property
    def whole(self) -> TensorMeta | None:
        """The form of its tensors, but for those of one element beside larger ones; None if they have several."""
        forms = dict.fromkeys(
            found for node in (*self.inputs, *self.nodes) if (found := form(node)) is not None
        )
        large = [found for found in forms if found.shape] or list(forms)
        return large[0] if len(large) == 1 else None


def parts_of(plan: Plan, in_place: Collection[int], *, apart: bool = False) -> list[Part]:
    """The parts of a plan whose results all go into the memory of state, at these positions of its outputs.

    No part reads memory that another one, or anything else at the end of the step, writes. With `apart`, there are also those
    of state whose new values are in memory of their own, which others may read.
    """
    program = plan.program
    times = Counter(item for item in output_nodes(program.graph) if isinstance(item, fx.Node))
    free = _apart(program, in_place, times) if apart else {}
    targets = _targets(plan, in_place, times) | free
    nodes = _update_of(program, targets, free)
    memory = plan.aliases
    written = {
        storage
        for position in in_place
        if position in plan.in_place
        for storage in memory.possible[plan.in_place[position].input]
    }
    found = (
        Part(tuple(group), {node: targets[node] for node in group if node in targets})
        for group in _connected(nodes)
    )
    return [
        part for part in found if part.writes and part.whole is not None and _is_alone(part, memory, written)
    ]


def reads_what_is_known(part: Part, known: Container[fx.Node]) -> bool:
    """True if all numbers that a part reads from tensors come from what the step is given, or from ops that are `known` to run first."""
    made = {
        node
        for node in part.inputs
        if node.op != "placeholder" and node not in known and form(node) is not None
    }
    for node in part.nodes:
        if not made.isdisjoint(node.all_input_nodes):
            if node.target is READ:
                return False
            made.add(node)
    return True


def _targets(plan: Plan, in_place: Collection[int], times: Counter[fx.Node]) -> dict[fx.Node, fx.Node]:
    """By node the state that it is written into, if it is no other output; `times` says how often each is one."""
    inputs = {node.name: node for node in plan.program.graph.find_nodes(op="placeholder")}
    outputs = output_nodes(plan.program.graph)
    return {
        outputs[position]: inputs[plan.in_place[position].input]
        for position in in_place
        if times[outputs[position]] == 1
    }


def _apart(program: Program, in_place: Collection[int], times: Counter[fx.Node]) -> dict[fx.Node, fx.Node]:
    """By node the state that it is the new value of, where that is not written in place, or not in every step.

    It is no other result of the step, and none is a view of it.
    """
    placeholders = program.graph.find_nodes(op="placeholder")
    states = {port.path: node for port, node in zip(program.inputs, placeholders, strict=True)}
    found: dict[fx.Node, fx.Node] = {}
    outputs = output_nodes(program.graph)
    for position, (item, port) in enumerate(zip(outputs, program.outputs, strict=True)):
        old = states.get(port.path)
        if port.role is not Role.STATE or not isinstance(item, fx.Node) or old is None:
            continue
        is_chosen = item.target is torch.ops.aten.where.self and item.args[2] is old
        new = item.args[1] if is_chosen else item
        if not isinstance(new, fx.Node) or form(new) != form(old) or any(map(is_view, new.users)):
            continue
        if (is_chosen or position not in in_place) and times[new] == (not is_chosen):
            found[new] = old
    return found


def _update_of(
    program: Program, targets: Mapping[fx.Node, fx.Node], free: Collection[fx.Node]
) -> list[fx.Node]:
    """Ops that work element by element, and serve nothing but what is written, or are free to serve others."""
    end = program.graph.output_node()
    serving: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if is_elementwise(node) and (
            node in free or all(user in serving or (user is end and node in targets) for user in node.users)
        ):
            serving.add(node)
    found: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        reads = form(node) is not None or node.target is READ
        if node in serving and (reads or any(item in found for item in node.all_input_nodes)):
            found[node] = None  # numbers that come from numbers alone stay with Python
    return list(found)


def is_elementwise(node: fx.Node) -> bool:
    """True for ops on floats of one form whose formula is known, and for arithmetic on Python's floats."""
    if node.op != "call_function" or not node.users:
        return False
    described = value(node)
    if isinstance(described, ScalarMeta):
        if node.target is READ:
            read = form(node.all_input_nodes[0])
            return read is not None and not read.shape and read.dtype in _FLOATS
        return (
            described.kind == "float"
            and node.target in NUMBERS
            and not node.kwargs
            and all(map(is_number, node.args))
        )
    made = form(node)
    if (
        made is None
        or made.dtype not in _FLOATS
        or made.device.type != "cpu"
        or made.varies
        or not fills_a_block(made.shape, made.stride)
    ):
        return False
    if node.target in CALLED:
        return len(node.args) == 1 and not node.kwargs and _is_like(node.args[0], made)
    return node.target in FORMULAS and fits(node, lambda item: _is_like(item, made))


def fits(node: fx.Node, is_taken: Callable[[Any], bool]) -> bool:
    """True if the arguments are tensors that are taken, and numbers where the op's kernel takes numbers."""
    given = named_arguments(node.target, node.args, node.kwargs)
    plain = True
    for argument in schema_arguments(node.target):
        item = given.get(argument.name, argument.default)
        if argument.kind == "Tensor" and not is_number(item):
            if not is_taken(item):
                return False
        elif item is None and argument.default is None:
            continue  # a bound that is left out
        elif not is_number(item):
            return False
        elif argument.kind == "Tensor":
            plain = False  # a number in the place of a tensor, of which eager's kernels take no multiple
    return plain or all(
        given.get(item.name, item.default) == item.default
        for item in schema_arguments(node.target)
        if item.default is not None
    )


def is_number(item: Any) -> bool:
    """True for a number, or what computes one."""
    if isinstance(item, fx.Node):
        described = value(item)
        return isinstance(described, ScalarMeta) and described.kind in ("float", "int")
    return type(item) in (int, float) and abs(item) < 2**53


def _is_like(item: Any, made: TensorMeta) -> bool:
    return isinstance(item, fx.Node) and form(item) == made


def _connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The nodes by groups that hang together, in their order."""
    together, inside = Groups(), set(nodes)
    for node in nodes:
        for item in node.all_input_nodes:
            if item in inside:
                together.join(node, item)
    return together.sorted(nodes)


def _is_alone(part: Part, memory: Aliases, written: set[Storage]) -> bool:
    """True if what it reads is written by nothing but itself, element by element, and is in memory as numbers."""
    own = set(part.writes.values())
    read = [node for node in part.inputs if form(node) is not None and node not in own]
    return all(is_plain(node) and not memory.possible[node.name] & written for node in read)


def is_plain(node: fx.Node) -> bool:
    """True if memory holds the numbers of a tensor: an input itself, at which each call looks, or what ops have made."""
    if node.op == "placeholder":
        return True
    pending, seen = [node], set[fx.Node]()
    while pending:
        item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        if item.op == "placeholder" or item.target in _PROMISES:
            return False
        shown = shown_values(item) if item.target is not operator.getitem else None
        pending += item.all_input_nodes if shown is None else list(itertools.chain.from_iterable(shown))
    return True
