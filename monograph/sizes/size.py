"""A size of a tensor in a program that varies: an int of its present value, which computes and compares by its expression."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from monograph.sizes.expression import Expression, outcome


class Undecided(Exception):
    """A comparison of sizes whose outcome is not the same for all of them."""


class Size(int):
    """A size that varies, with its value at the capture. It equals only what has its expression.

    What is computed from it is such a size too. A comparison that is not the same for all sizes raises `Undecided`: whoever
    wants the present value asks for `int(size)`.
    """

    expression: Expression

    def __new__(cls, value: int, expression: Expression) -> Size:
        made = super().__new__(cls, value)
        made.expression = expression
        return made

    @property
    def name_and_parts(self) -> tuple[str, int]:
        """The name of the size that an argument has in a dimension so many times."""
        (((name,), parts),) = self.expression.terms.items()
        assert isinstance(name, str)
        return name, parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.expression == other.expression

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.expression)

    def __neg__(self) -> int:
        return size_of(-int(self), -self.expression)

    def __bool__(self) -> bool:
        return _outcome(operator.ne, self, 0)

    def __repr__(self) -> str:
        return str(self.expression)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce__(self) -> Any:
        return Size, (int(self), self.expression)


def varies(shape: Iterable[int]) -> bool:
    """True if one of these sizes varies."""
    return any(isinstance(size, Size) for size in shape)


def size_of(value: int, expression: Expression) -> int:
    """A size; a plain number if it does not vary."""
    return Size(value, expression) if expression.number is None else expression.number


def expression_of(item: int) -> Expression:
    """What a size or a plain number is in terms of sizes."""
    return item.expression if isinstance(item, Size) else Expression.of(int(item))


def _outcome(target: Callable[[Any, Any], bool], left: int, right: int) -> bool:
    found = outcome(target, expression_of(left), expression_of(right))
    if found is None:
        raise Undecided(f"{left} {target.__name__} {right} depends on the sizes")
    return found


def _computed(name: str, target: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[Size, Any], Any]:
    plain = getattr(int, name)

    def run(self: Size, other: Any) -> Any:
        if not isinstance(other, int):
            return plain(int(self), other)
        left, right = (other, self) if swapped else (self, other)
        return size_of(target(int(left), int(right)), target(expression_of(left), expression_of(right)))

    return run


def _compared(name: str, target: Callable[[Any, Any], bool]) -> Callable[[Size, Any], Any]:
    plain = getattr(int, name)

    def run(self: Size, other: Any) -> Any:
        return _outcome(target, self, other) if isinstance(other, int) else plain(int(self), other)

    return run


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _target = getattr(operator, _name)
    setattr(Size, f"__{_name}__", _computed(f"__{_name}__", _target, swapped=False))
    setattr(Size, f"__r{_name}__", _computed(f"__r{_name}__", _target, swapped=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Size, f"__{_name}__", _compared(f"__{_name}__", getattr(operator, _name)))
