"""Arithmetic of Python on numbers that may move: how each operation is computed, and how it reads in a condition."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.compat.symbolic_numbers import SYMBOLIC_MATH
from monograph.ir.call.numbers import bits


@dataclass(frozen=True)
class Operation:
    """An operation on plain numbers. `raises` says that it may, for values that no condition has seen."""

    compute: Callable[..., Any]
    text: str
    raises: bool = False


def larger(a: Any, b: Any) -> Any:
    """torch.sym_max on plain numbers: Python's `max`, as a float if one of them is."""
    return _promoted(max, a, b)


def smaller(a: Any, b: Any) -> Any:
    """torch.sym_min on plain numbers."""
    return _promoted(min, a, b)


def _promoted(choose: Callable[..., Any], a: Any, b: Any) -> Any:
    return float(choose(a, b)) if isinstance(a, float) or isinstance(b, float) else choose(a, b)


def same(a: float, b: float) -> bool:
    """True for two numbers with the same bits: zeros and NaNs with their sign."""
    if a == b and a != 0:
        return True
    return (a == b or (a != a and b != b)) and bits(a) == bits(b)


def raises(kind: type[Exception], compute: Callable[[], Any]) -> bool:
    """True if an operation raises an error of this very class."""
    try:
        compute()
    except (ArithmeticError, ValueError) as error:
        return type(error) is kind
    return False


def _called(compute: Callable[..., Any], name: str, *, raises: bool = True) -> Operation:
    return Operation(compute, name + "({})", raises)


# by the function that stands in a program. Functions of `math` are taken now: a trace replaces them for a while
OPERATIONS: Mapping[Any, Operation] = {
    operator.add: Operation(operator.add, "({} + {})"),
    operator.sub: Operation(operator.sub, "({} - {})"),
    operator.mul: Operation(operator.mul, "({} * {})"),
    operator.truediv: Operation(operator.truediv, "({} / {})", raises=True),
    operator.floordiv: Operation(operator.floordiv, "({} // {})", raises=True),
    operator.mod: Operation(operator.mod, "({} % {})", raises=True),
    operator.pow: Operation(operator.pow, "(({}) ** {})", raises=True),
    operator.neg: Operation(operator.neg, "(-{})"),
    operator.abs: _called(operator.abs, "abs", raises=False),
    math.floor: _called(math.floor, "math.floor"),
    math.ceil: _called(math.ceil, "math.ceil"),
    math.trunc: _called(math.trunc, "math.trunc"),
    math.exp: _called(math.exp, "math.exp"),
    math.log: _called(math.log, "math.log"),
    builtins.round: Operation(round, "round({}, {})", raises=True),
    torch.sym_float: _called(float, "float"),
    torch.sym_max: Operation(larger, "max({}, {})"),
    torch.sym_min: Operation(smaller, "min({}, {})"),
    **{target: _called(getattr(math, name), f"math.{name}") for name, target in SYMBOLIC_MATH.items()},
}

LARGEST_INT = 2**63


@dataclass(frozen=True)
class Operand:
    """What is known of an operand before it has its value: `is_bounded` for an int of 64 bits, `value` of a constant."""

    kind: type
    is_bounded: bool
    value: float | None = None


def takes_all(target: Any, operands: Sequence[Operand]) -> bool:
    """True if an operation gives a number whatever its operands are: Python raises nothing then."""
    if any(item.kind is int and not item.is_bounded for item in operands):
        return False  # one that is too large for a float cannot be added to one
    if not OPERATIONS[target].raises:
        return True
    return target is operator.truediv and bool(operands[-1].value)


SIGNS: Mapping[Any, str] = {
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
_OPPOSITES = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}


def comparison(target: Any, a: str, b: str, outcome: bool, *, ordered: bool) -> str:
    """The condition that a comparison has this outcome; `ordered` if neither side can be a NaN."""
    sign = SIGNS[target]
    if outcome:
        return f"{a} {sign} {b}"
    return f"{a} {_OPPOSITES[sign]} {b}" if ordered or sign in ("==", "!=") else f"not {a} {sign} {b}"


Condition = tuple[str, tuple[str, ...]]  # a text, and the names in it


@dataclass
class Branches:
    """What Python has decided on moving numbers in one trace, as texts over their names."""

    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # each with the names in it

    def note(self, text: str, names: tuple[str, ...]) -> None:
        """Remember a condition; the same one twice is one."""
        self.texts.setdefault(text, names)
