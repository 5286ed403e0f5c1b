"""Expressions over numbers as JSON: how an artifact holds the branches of a step. Evaluated by a walk, never as code.

A number is itself, `["inputs", 3]` is a number from a named list, and `["<=", a, b]` applies a function of the table
to expressions.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from monograph.capture.numbers.arithmetic import same
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.leaves import MAX_INT, Json, check
from monograph.sizes.size import Size

Scope = Mapping[str, Sequence[Any]]
Expression = Callable[[Scope], Any]

_MAX_DEPTH: Final = 100
_OF_MATH: Final = "sqrt floor ceil trunc log exp sin cos tan sinh cosh tanh asin acos atan log2"
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": lambda base, exponent: float(base) ** exponent,  # of integers it might never end
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "neg": operator.neg,
    "not": operator.not_,
    "and": lambda *items: all(items),
    "or": lambda *items: any(items),
    "same": same,
    "max": max,
    "min": min,
    "abs": abs,
    "round": round,
    "int": int,
    "float": float,
    **{name: getattr(math, name) for name in _OF_MATH.split()},
}
_SIGNS: Final[Mapping[type, str]] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.USub: "neg",
    ast.Not: "not",
    ast.And: "and",
    ast.Or: "or",
}


def to_json(
    text: str, lists: Mapping[str, str], sizes: Mapping[tuple[int, int], Size] = MappingProxyType({})
) -> Json:
    """The expression that a Python text says; `lists` gives the names of the lists that it takes numbers from.

    `sizes` are those of the first list's tensors that vary, by position and dimension; they are in the JSON as they are.
    """
    try:
        return _written(_Placed(sizes).visit(ast.parse(text, mode="eval")).body, lists)
    except (SyntaxError, KeyError):
        raise Refused(f"the step branches on `{text}`, which an artifact cannot hold") from None


def from_json(value: Json, lists: Mapping[str, int]) -> Expression:
    """The function that an expression is; `lists` gives the lengths of the lists that it may take numbers from."""
    return _read(value, lists, _MAX_DEPTH)


class _Placed(ast.NodeTransformer):
    """Puts sizes in place of `i[3].size(1)`."""

    def __init__(self, sizes: Mapping[tuple[int, int], Size]) -> None:
        self._sizes = sizes

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(
                ast.Attribute(ast.Subscript(_, ast.Constant(int() as position)), "size"),
                [ast.Constant(int() as dim)],
            ):
                return ast.Constant(self._sizes[position, dim])
        return self.generic_visit(node)


def _written(node: ast.expr, lists: Mapping[str, str]) -> Json:
    match node:
        case ast.Constant(bool() | int() | float() as number):
            return number
        case ast.Subscript(ast.Name(name), ast.Constant(int() as index)):
            return [lists[name], index]
        case ast.BinOp(left, sign, right):
            return [_SIGNS[type(sign)], _written(left, lists), _written(right, lists)]
        case ast.UnaryOp(sign, operand):
            return [_SIGNS[type(sign)], _written(operand, lists)]
        case ast.BoolOp(sign, values):
            return [_SIGNS[type(sign)], *(_written(item, lists) for item in values)]
        case ast.Compare(left, signs, comparators):
            sides = [_written(item, lists) for item in (left, *comparators)]
            pairs = [[_SIGNS[type(sign)], *pair] for sign, pair in zip(signs, pairwise(sides), strict=True)]
            return pairs[0] if len(pairs) == 1 else ["and", *pairs]
        case ast.Call(ast.Name(name) | ast.Attribute(ast.Name("math"), name), arguments, []):
            _FUNCTIONS[name]  # KeyError for one that is not in the table
            return [name, *(_written(item, lists) for item in arguments)]
    raise KeyError(type(node))


def _read(value: Json, lists: Mapping[str, int], depth: int) -> Expression:
    check(depth > 0, "an expression is nested too deep")
    kind = type(value)
    if kind in (bool, int, float):
        check(kind is bool or -MAX_INT <= value <= MAX_INT, "an expression has a number that is too large")
        return lambda _scope: value
    check(kind is list and len(value) > 1 and type(value[0]) is str, "an expression is no call")
    name, *rest = value
    if name in lists:
        index: Any = rest[0]
        fits = len(rest) == 1 and type(index) is int and 0 <= index < lists[name]
        check(fits, f"an expression takes what is not in {name}")
        return lambda scope: scope[name][index]
    check(name in _FUNCTIONS, f"an expression has the unknown function {name[:40]!r}")
    function, arguments = _FUNCTIONS[name], [_read(item, lists, depth - 1) for item in rest]
    return lambda scope: function(*(argument(scope) for argument in arguments))
