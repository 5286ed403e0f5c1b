"""Numbers that may move between steps.

Each knows its present value. Its arithmetic (`recorded_arithmetic.py`) gives other such numbers and becomes nodes of the
program; what Python decides on one of them (a comparison, a truth value) becomes a condition; what leaves them (`float(x)`, `hash(x)`, a text,
C code that takes a float) is the present value, on the condition that it is this very value.

A number that the step itself computes has no present value: it can be computed with and kept, and not decided on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.arithmetic import OPERATIONS, Branches, Condition, comparison
from monograph.capture.numbers.taken import MANY_TO_ONE, Taken, taken_here
from monograph.compat.modes import current_tracer
from monograph.compat.symbolic_numbers import (
    SymNode,
    node_of_number,
    opaque_symbol,
    place_number,
    symbol_name,
)
from monograph.errors import DataDependentError
from monograph.ir.call.numbers import spell_number
from monograph.sizes.expression import Expression
from monograph.sizes.expression import outcome as outcome_of
from monograph.user_code.lines import Origin, user_place

LONGEST = 256  # operations in a condition; longer ones ask for the very values that they begin with
_EXACT = 2**53  # ints up to here are floats
_KINDS: dict[type, Callable[[Any], Any]] = {}  # what stands for an int and for a float


def stands_for(kind: type, number: Callable[[Any], Any]) -> None:
    """Let a class stand for the moving numbers of a kind."""
    _KINDS[kind] = number


@dataclass
class Moving:
    """The moving numbers of one trace."""

    mode: Any  # of the fake tensors beside them
    branches: Branches = field(default_factory=Branches)
    risky: list[tuple[Node, Any]] = field(default_factory=list)  # what may raise, and its node in the trace
    whole: bool = False  # some are ints
    products: list[tuple[Node, Any]] = field(default_factory=list)  # of ints, and their nodes in the trace
    too_wide: bool = False  # the program has a product that compiled code may have no bits for
    made: dict[Any, Any] = field(
        default_factory=dict
    )  # by operation and operands, so that none is done twice
    sizes: dict[Any, Any] = field(default_factory=dict)  # by expression
    # sizes that only one number fits, and other numbers whose very value is taken: with the user's line
    fixed: dict[str, Origin] = field(default_factory=dict)
    taken: dict[str, Taken] = field(default_factory=dict)

    def leaf(self, name: str, value: float, symbol: Any = None, *, finite: bool = False) -> Any:
        """A number that comes from outside, or out of a tensor whose torch number is `symbol`.

        `finite` if the guards of the build say so.
        """
        node = Node(self, value, name=name)
        node.ordered |= finite
        node.symbol = symbol
        return number_of(node)

    def note_recorded(self, node: Node, recorded: Any) -> None:
        """A number has its node in the trace: what compiled code would do otherwise than Python is looked at later."""
        if OPERATIONS[node.target].raises:
            self.risky.append((node, recorded))
        is_size = node.expression is not None  # of which no product is too wide
        if node.pytype is int and node.target in (operator.mul, operator.pow) and not is_size:
            self.products.append((node, recorded))

    def conditions(self, graph: fx.Graph) -> list[Condition]:
        """What Python decided, with the names in it; and of arithmetic that no program does, that it does not raise."""
        live = set(graph.nodes)
        self._hold_fine(node for node, recorded in self.risky if recorded not in live)
        for node, recorded in self.products:
            if not node.is_known:
                self.too_wide |= recorded in live
            elif recorded in live and abs(node.value) <= _EXACT:
                node.hold_exact()
            else:
                self.too_wide |= recorded in live
        return list(self.branches.texts.items())

    def unraised(self, graph: fx.Graph, checked: Collection[str]) -> list[Condition]:
        """That the program's arithmetic on the numbers with these names does not raise; apart from what Python decided."""
        live, decided = set(graph.nodes), self.branches
        self.branches = Branches()
        try:
            self._hold_fine(
                node
                for node, recorded in self.risky
                if recorded in live and all(leaf.name in checked for leaf in node.leaves())
            )
            return list(self.branches.texts.items())
        finally:
            self.branches = decided

    def _hold_fine(self, nodes: Iterable[Node]) -> None:
        within = set[int]()
        for node in reversed(list(nodes)):  # from the whole to its parts
            if node.is_known and id(node) not in within:
                node.hold_fine()
                within |= {id(part) for part in node.parts()}

    def fix(self, sizes: Expression | None) -> None:
        """Note that the build serves the present sizes alone; a quotient leaves others, too."""
        if sizes is not None and sizes.is_product_sum:
            for name in sizes.names():
                self.fixed.setdefault(name, user_place())

    def read_out(self, number: Any, value: Any = None) -> Any:
        """A number that the trace reads out of a tensor as one that moves. `value` is its present one, None if unknown."""
        name, symbol = symbol_name(number), number.node.expr
        if value is None:
            node = Node(self, None, name=name, kind=float if isinstance(number, torch.SymFloat) else int)
            node.symbol = symbol
            made = number_of(node)
        else:
            made = self.leaf(name, value, symbol)
        tracer = current_tracer()
        place_number(made, node_of_number(number, tracer), tracer)
        return made


class Node(SymNode):  # type: ignore[misc]
    """How a moving number is computed, as torch asks for it from C++ and from its kernels for fake tensors."""

    expression: Expression | None = None  # of sizes, if it is made of them

    def __init__(
        self,
        moving: Moving,
        value: float | None,
        target: Any = None,
        operands: tuple[Any, ...] = (),
        name: str = "",
        kind: type | None = None,
    ) -> None:
        self.moving, self.target, self.operands = moving, target, operands
        self.name = name or f"zf_{len(moving.made)}"
        self.pytype, self._hint = kind or type(value), value
        moving.whole |= self.pytype is int
        self.shape_env, self.constant, self.fx_node = moving.mode.shape_env, None, None
        self.symbol: Any = None
        self.size = 1 + sum(item.node.size for item in operands if is_moving(item))
        self.ordered = self.pytype is not float  # never a NaN
        self._text: str | None = None

    @property
    def is_known(self) -> bool:
        """True if it has a present value: the step does not compute it."""
        return self._hint is not None

    @property
    def value(self) -> Any:
        """The present value. Raises DataDependentError for a number that the step computes."""
        if self._hint is None:
            raise DataDependentError(
                "Python asked for the value of a tensor while the step was being captured",
                hint="return it, and print it or decide on it outside of build(); to decide inside: torch.where or "
                "torch.cond. A number from .item() can be computed with and kept",
            )
        return self._hint

    @property
    def expr(self) -> Any:
        """A symbol of its own: torch's algebra on it knows nothing, and changes nothing."""
        if self.symbol is None:
            self.symbol = opaque_symbol(self.shape_env, self.name, self._hint)
        return self.symbol

    _expr = expr

    @property
    def text(self) -> str:
        """The number as Python over the names of inputs."""
        if self._text is None:
            texts = [item.node.text if is_moving(item) else spell_number(item) for item in self.operands]
            self._text = OPERATIONS[self.target].text.format(*texts) if self.target else self.name
        return self._text

    def parts(self) -> list[Node]:
        """The number itself, and all that it is computed from."""
        found, pending = {id(self): self}, [self]
        while pending:
            inner = {id(item.node): item.node for item in pending.pop().operands if is_moving(item)}
            pending += [node for key, node in inner.items() if key not in found]
            found |= inner
        return list(found.values())

    def leaves(self) -> set[Node]:
        """The numbers from outside that it is computed from."""
        return {node for node in self.parts() if not any(map(is_moving, node.operands))}

    def hold(self) -> Any:
        """The present value as a constant of this build."""
        if self.pytype is bool and self.operands:
            return decide(self.target, *self.operands)
        self.moving.fix(self.expression)
        if self.size > LONGEST:
            for leaf in self.leaves():
                leaf.hold()
        else:
            self.need(f"same({{}}, {spell_number(self.value)})")
            if not any(part.target in MANY_TO_ONE for part in self.parts()):
                here = taken_here()
                self.moving.taken |= {leaf.name: here for leaf in self.leaves()} | self.moving.taken
        return self.value

    def copied(self, name: str) -> Node:
        """Another node of the same value, from outside."""
        return Node(self.moving, self.value if self.is_known else None, name=name, kind=self.pytype)

    def need(self, condition: str) -> None:
        """A condition on the number, which stands in it as `{}`."""
        self.moving.branches.note(condition.format(self.text), names_in(self))

    def hold_fine(self) -> None:
        """The condition that it can be computed."""
        if self.size > LONGEST:
            self.hold()
        else:
            self.need("same({0}, {0})")

    def hold_exact(self) -> None:
        """The condition that compiled code has the bits for it."""
        if self.size > LONGEST:
            self.hold()
        else:
            self.need(f"-{_EXACT} <= {{}} <= {_EXACT}")

    # --- what torch asks -----------------------------------------------------------------------------------------

    def maybe_as_int(self) -> None:
        """Never a constant in disguise."""

    maybe_as_float = maybe_as_bool = maybe_as_int

    def guard_int(self, _file: str = "", _line: int = 0) -> int:
        return int(self.hold())

    def guard_float(self, _file: str = "", _line: int = 0) -> float:
        return float(self.hold())

    def guard_bool(self, _file: str = "", _line: int = 0) -> bool:
        return bool(self.hold()) if self.pytype is bool else decide(operator.ne, number_of(self), 0)

    def truth(self) -> bool:
        """True if it is, or is not 0."""
        return self.guard_bool()

    def __str__(self) -> str:
        return self.name

    __repr__ = _graph_repr = str = __str__


def names_in(*nodes: Node) -> tuple[str, ...]:
    """The names of the numbers from outside that some are computed from, in order."""
    return tuple(sorted({leaf.name for node in nodes for leaf in node.leaves()}))


def is_moving(item: Any) -> bool:
    """True for the numbers of this file, also in the form in which torch hands them on."""
    return issubclass(type(item), (torch.SymFloat, torch.SymInt)) and isinstance(item.node, Node)


def number_of(node: Node) -> Any:
    """The number that a node stands for; of a comparison that nobody has asked for yet torch's own."""
    if node.pytype is bool:
        return torch.SymBool(node)
    return _KINDS[node.pytype](node)


def as_numbers(item: Any) -> Any:
    """What C++ gives of numbers that move, in the class that has a text, a hash and a type as plain ones do."""
    kind = type(item)
    if kind is torch.SymInt and is_moving(item):
        return number_of(item.node)
    if kind in (torch.Size, tuple) and any(type(part) is torch.SymInt for part in item):
        return kind(map(as_numbers, item))
    return item


def plain(item: Any) -> Any:
    """The value of a moving number as a constant of this build; anything else as it is."""
    return item.node.hold() if is_moving(item) else item


def value_of(item: Any) -> Any:
    """The present value of a number."""
    return item.node.value if is_moving(item) else item


def expression_of(item: Any) -> Expression | None:
    """What a number is in terms of sizes; None for one that is not made of sizes."""
    if type(item) is int:
        return Expression.of(item)
    return item.node.expression if is_moving(item) else None


def kind_of(item: Any) -> type:
    """int or float, also of a number that moves."""
    return item.node.pytype if is_moving(item) else type(item)


def decide(target: Any, a: Any, b: Any) -> bool:
    """The outcome of a comparison, on the condition that it stays."""
    sizes = expression_of(a), expression_of(b)
    if sizes[0] is not None and sizes[1] is not None and (always := outcome_of(target, *sizes)) is not None:
        return always
    outcome = target(value_of(a), value_of(b))
    nodes = [item.node for item in (a, b) if is_moving(item)]
    if target is (operator.eq if outcome else operator.ne) and len(nodes) == 1:
        nodes[0].moving.fix(nodes[0].expression)
    if sum(node.size for node in nodes) > LONGEST:
        for node in nodes:
            node.hold()
        return bool(outcome)
    left, right = (item.node.text if is_moving(item) else spell_number(item) for item in (a, b))
    ordered = all(item.node.ordered if is_moving(item) else item == item for item in (a, b))
    text = comparison(target, left, right, outcome, ordered=ordered)
    nodes[0].moving.branches.note(text, names_in(*nodes))
    return bool(outcome)
