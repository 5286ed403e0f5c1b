"""Sizes that vary: whole numbers on which Python, C++ and torch's shape functions compute and decide alike.

Each is known by its `Expression`. What follows from that alone, whatever the sizes are, is no condition: `b * 64 == 64 * b`,
or that a size is not 0. Everything else that is decided on sizes is a condition of the build, as on other numbers that move.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.capture.numbers.layouts import LAYOUTS, is_dense
from monograph.capture.numbers.moving import (
    Moving,
    Node,
    decide,
    expression_of,
    is_moving,
    number_of,
    plain,
    value_of,
)
from monograph.compat.fakes import NumbersAsked
from monograph.compat.symbolic_numbers import METHODS_OF_NUMBERS, SymNode, opaque_symbol, plain_expression
from monograph.sizes.expression import Expression
from monograph.sizes.size import Size

_LONGEST = (
    2000  # signs of a size in terms of others; one that is longer is a number, since each step computes it
)
_COMPUTED = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}
)


def computed(target: Any, operands: Sequence[Any]) -> Any:
    """The number that an operation on sizes gives: one that varies, or a plain one; None if it is no such operation."""
    if target not in _COMPUTED or all(type(item) is int for item in operands):
        return None
    expressions = [expression_of(item) for item in operands]
    if None in expressions:
        return None
    if target in (operator.floordiv, operator.mod):
        decide(operator.ne, operands[1], 0)
    expression: Expression = target(*expressions)
    if expression.number is not None:
        return expression.number
    if len(str(expression)) > _LONGEST:
        value: int = target(*map(plain, operands))
        return value
    moving: Moving = next(item.node.moving for item in operands if is_moving(item))
    if expression not in moving.sizes:
        value = target(*map(value_of, operands))
        moving.sizes[expression] = number_of(SizeNode(moving, expression, value, target, tuple(operands)))
    return moving.sizes[expression]


def size_number(moving: Moving, size: int) -> Any:
    """The number that stands for a size in a trace; a plain one for a size that does not vary."""
    if not isinstance(size, Size):
        return size
    if size.expression not in moving.sizes:
        moving.sizes[size.expression] = number_of(SizeNode(moving, size.expression, int(size)))
    return moving.sizes[size.expression]


# --- as C++ asks for them ------------------------------------------------------------------------------------------


class _Asked(SymNode):  # type: ignore[misc]
    """What C++ may ask of any number of this file. A constant is of the same class as the others, since C++ asks the one
    for its sum with the other."""

    moving: Moving
    is_known = True

    def wrap_int(self, number: int) -> Any:
        return Constant(self.moving, number)

    def wrap_bool(self, truth: bool) -> Any:
        return Constant(self.moving, bool(truth))

    def wrap_float(self, number: float) -> Any:
        return Constant(self.moving, number)

    def clone(self) -> Any:
        return self

    def is_int(self) -> bool:
        return self.pytype is int

    def is_bool(self) -> bool:
        return self.pytype is bool

    def is_float(self) -> bool:
        return self.pytype is float

    def truth(self) -> bool:
        """True if it is, or is not 0."""
        raise NotImplementedError

    def guard_bool(self, _file: str = "", _line: int = 0) -> bool:
        return self.truth()

    guard_or_false = guard_or_true = guard_size_oblivious = expect_true = statically_known_true = guard_bool

    def expect_size(self, _file: str = "", _line: int = 0) -> bool:
        return True

    def sym_and(self, other: Any) -> Any:
        return self.wrap_bool(self.truth() and other.truth())

    def sym_or(self, other: Any) -> Any:
        return self.wrap_bool(self.truth() or other.truth())

    def sym_not(self) -> Any:
        return self.wrap_bool(not self.truth())

    and_, or_ = sym_and, sym_or

    def sym_ite(self, then: Any, otherwise: Any) -> Any:
        return then if self.truth() else otherwise


class Constant(_Asked):
    """A plain number among those that vary."""

    def __init__(self, moving: Moving, value: float) -> None:
        self.moving, self.value, self.pytype = moving, value, type(value)
        self.shape_env, self.constant, self.fx_node = moving.mode.shape_env, value, None
        self._hint = value

    @property
    def expr(self) -> Any:
        return plain_expression(self.value)

    _expr = expr

    def is_constant(self) -> bool:
        return True

    def maybe_as_int(self) -> int | None:
        return self.value if self.pytype is int else None  # type: ignore[return-value]

    def maybe_as_float(self) -> float | None:
        return self.value if self.pytype is float else None

    def maybe_as_bool(self) -> bool | None:
        return bool(self.value) if self.pytype is bool else None

    def truth(self) -> bool:
        return bool(self.value)

    def guard_int(self, _file: str = "", _line: int = 0) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return repr(self.value)

    __repr__ = _graph_repr = str = __str__


class Comparison(_Asked):
    """A comparison that nobody has decided on yet."""

    def __init__(self, moving: Moving, target: Any, operands: tuple[Any, Any]) -> None:
        self.moving, self.target, self.operands, self.pytype = moving, target, operands, bool
        self.shape_env, self.constant, self.fx_node = moving.mode.shape_env, None, None
        self._hint = bool(target(*map(value_of, operands)))

    @property
    def expr(self) -> Any:
        """A symbol of its own: it is known for no sizes alike."""
        return opaque_symbol(self.shape_env, f"z_{id(self)}", self._hint)

    _expr = expr

    def is_constant(self) -> bool:
        return False

    def truth(self) -> bool:
        return decide(self.target, *self.operands)

    def __str__(self) -> str:
        return f"{self.target.__name__}{self.operands}"

    __repr__ = _graph_repr = str = __str__


class SizeNode(_Asked, Node):
    """A whole number that is computed from sizes, as torch asks for it from C++."""

    def __init__(
        self,
        moving: Moving,
        expression: Expression,
        value: int,
        target: Any = None,
        operands: tuple[Any, ...] = (),
    ) -> None:
        Node.__init__(self, moving, value, target, operands, name=str(expression))
        self.expression = self.made_of = expression
        self.size = 1

    @property
    def text(self) -> str:
        """The number as Python over the names of sizes."""
        return self.made_of.as_part()

    def leaves(self) -> set[Node]:
        """The sizes that it is computed from."""
        return {self.moving.sizes[Expression.of(name)].node for name in self.made_of.names()}

    def copied(self, _name: str) -> SizeNode:
        return SizeNode(self.moving, self.made_of, self.value)

    def is_constant(self) -> bool:
        return False

    def guard_int(self, _file: str = "", _line: int = 0) -> int:
        if self.moving.mode.has_formula:
            raise NumbersAsked
        return super().guard_int()

    def truth(self) -> bool:
        return decide(operator.ne, number_of(self), 0)


def _number(node: Any) -> Any:
    if isinstance(node, Constant):
        return node.value
    return number_of(node)


def _node(number: Any, like: Any) -> Any:
    return number.node if is_moving(number) else Constant(like.moving, number)


def _operation(act: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *others: Any) -> Any:
        return _node(act(*map(_number, (self, *others))), self)

    return run


def _comparison(target: Any) -> Callable[..., Any]:
    def run(self: Any, other: Any) -> Any:
        return Comparison(self.moving, target, (_number(self), _number(other)))

    return run


def _of_values(act: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *items: act(*map(plain, items))


def _sum(self: Any, items: Sequence[Any]) -> Any:
    return _node(sum(map(_number, items)), self)


_Asked.sym_sum = _sum
for _name, _act in METHODS_OF_NUMBERS.items():  # of what follows, the rest: they take present values
    setattr(_Asked, _name, _operation(_of_values(_act)))
for _name, _act in (
    ("add", operator.add),
    ("sub", operator.sub),
    ("mul", operator.mul),
    ("floordiv", operator.floordiv),
    ("int_floordiv", operator.floordiv),
    ("clean_div", operator.floordiv),
    ("mod", operator.mod),
    ("int_truediv", operator.truediv),
    ("truediv", operator.truediv),
    ("neg", operator.neg),
    ("pos", operator.pos),
    ("sym_float", torch.sym_float),
    ("sym_max", lambda a, b: a if decide(operator.ge, a, b) else b),
    ("sym_min", lambda a, b: a if decide(operator.le, a, b) else b),
):
    setattr(_Asked, _name, _operation(_act))
for _target in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(_Asked, _target.__name__, _comparison(_target))


def _layout(test: Callable[..., bool]) -> Callable[..., Any]:
    def run(self: Any, sizes: Sequence[Any], strides: Sequence[Any]) -> Any:
        return self.wrap_bool(test([*map(_number, sizes)], [*map(_number, strides)]))

    return run


for _name, _test in LAYOUTS.items():
    setattr(_Asked, _name, _layout(_test))


def _dense_indicator(self: Any, sizes: Sequence[Any], strides: Sequence[Any]) -> Any:
    return self.wrap_int(int(is_dense([*map(_number, sizes)], [*map(_number, strides)])))


_Asked.is_non_overlapping_and_dense_indicator = _dense_indicator
