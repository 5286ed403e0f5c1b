"""Numbers that Python computes beside a program: from others that it finds before the step, and from what that gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from monograph.capture.numbers.arithmetic import LARGEST_INT, OPERATIONS, Operand, takes_all
from monograph.capture.numbers.moving import Node, is_moving
from monograph.ir.graph_signature import Bindable, Number, ReadAfter
from monograph.sizes.place import SizePlace

Leaf = Number | ReadAfter | SizePlace | int


@dataclass(frozen=True)
class Known:
    """An operand that is a value of its own."""

    value: Any


@dataclass(frozen=True)
class Line:
    """One operation. Operands are values, or numbers by their place among those that are known by then."""

    compute: Callable[..., Any]
    operands: tuple[Known | int, ...]


@dataclass(frozen=True)
class Expression(Bindable):
    """A number from others, computed as Python does: ints have no bounds, and no compiler rounds.

    `leaves` are read where they are, or are inputs of the program by their positions, sizes of inputs, or outputs of it.
    `may_raise` says that Python may refuse what they are in a later step.
    """

    leaves: tuple[Leaf, ...]
    lines: tuple[Line, ...]
    may_raise: bool = False

    @property
    def may_fail_after(self) -> bool:
        """True if only the values that the step computes say whether Python raises an error."""
        return self.may_raise and not self.is_known

    def placed(self, positions: Mapping[int, int]) -> Expression:
        """The same where inputs of the program have got other positions."""
        return replace(self, leaves=tuple(_placed(leaf, positions) for leaf in self.leaves))

    @cached_property
    def is_known(self) -> bool:
        """True if it has its value before the step."""
        return not any(isinstance(leaf, ReadAfter) for leaf in self.leaves)

    def before(self, inputs: Sequence[Any]) -> list[Any]:
        """The leaves that are known before a step with these inputs, the others as they are."""
        return [_before(leaf, inputs) for leaf in self.leaves]

    def after(self, known: Sequence[Any], read_out: Callable[[ReadAfter], float]) -> Any:
        """The value, from what was `known` before the step and what is read out of its outputs."""
        values = [read_out(item) if isinstance(item, ReadAfter) else item for item in known]
        for line in self.lines:
            operands = [item.value if isinstance(item, Known) else values[item] for item in line.operands]
            values.append(line.compute(*operands))
        return values[-1]


def _placed(leaf: Leaf, positions: Mapping[int, int]) -> Leaf:
    if isinstance(leaf, SizePlace):
        return leaf._replace(position=positions[leaf.position])
    return positions[leaf] if isinstance(leaf, int) else leaf


def _before(leaf: Leaf, inputs: Sequence[Any]) -> Any:
    if isinstance(leaf, Number):
        return leaf.read()
    if isinstance(leaf, SizePlace):
        return inputs[leaf.position].shape[leaf.dim] // leaf.parts
    return inputs[leaf] if isinstance(leaf, int) else leaf


def expression_of(number: Any, leaves: Mapping[str, Leaf]) -> Expression | None:
    """How a moving number is computed from `leaves`, by their names; None if it depends on others too."""
    nodes = _in_order(number.node)
    found = [node for node in nodes if node.target is None]
    if any(node.name not in leaves for node in found):
        return None
    computed = [node for node in nodes if node.target is not None]
    at = {id(node): place for place, node in enumerate([*found, *computed])}

    def operand(item: Any) -> Known | int:
        return at[id(item.node)] if is_moving(item) else Known(item)

    lines = [Line(OPERATIONS[node.target].compute, tuple(map(operand, node.operands))) for node in computed]
    may_raise = not all(takes_all(node.target, tuple(map(_operand_of, node.operands))) for node in computed)
    return Expression(tuple(leaves[node.name] for node in found), tuple(lines), may_raise)


def _operand_of(item: Any) -> Operand:
    """What is known of an operand whatever its value: ints that Python computes have no bounds, others have 64 bits."""
    if is_moving(item):
        return Operand(item.node.pytype, is_bounded=item.node.target is None and not item.node.is_known)
    value = item if isinstance(item, (int, float)) else None
    return Operand(type(item), is_bounded=value is None or abs(value) < LARGEST_INT, value=value)


def _in_order(last: Node) -> list[Node]:
    """The nodes that a number is made of, each after its operands."""
    found: dict[int, Node] = {}
    pending = [(last, False)]
    while pending:
        node, ready = pending.pop()
        if id(node) in found:
            continue
        if ready:
            found[id(node)] = node
            continue
        pending.append((node, True))
        pending += [(item.node, False) for item in node.operands if is_moving(item)]
    return list(found.values())
