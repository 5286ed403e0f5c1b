"""Whole numbers that are computed from sizes, in one normal form: sums of products with whole factors.

Two expressions are the same if and only if they are equal, as long as no division is in them that leaves a rest. That is
what keeps conditions few: `(h + 2 - 2 - 1) // 1 + 1` is `h`, and `b * 64 == 64 * b` needs no condition.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

SMALLEST: Final = 2  # of a size that varies: 0 and 1 are sizes of their own, at which torch does other things
_LARGEST: Final = 1 << 62  # no size comes near it
_REMEMBERED: Final = 10_000  # results of each operation
Product = tuple["Atom", ...]  # in order; a power is an atom several times


@dataclass(frozen=True, repr=False)
class Quotient:
    """`dividend // divisor`, where nothing could be taken out of it."""

    dividend: Expression
    divisor: Expression

    @cached_property
    def _text(self) -> str:
        return f"({self.dividend.as_part()} // {self.divisor.as_part()})"

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


Atom = str | Quotient  # a size by its name, or a quotient


@dataclass(frozen=True, repr=False)
class Expression:
    """A sum of products. `terms` has the factor of each product, none of them 0."""

    terms: Mapping[Product, int]

    @staticmethod
    def of(item: int | str) -> Expression:
        """A number, or a size by its name."""
        return _of(item)

    @cached_property
    def number(self) -> int | None:
        """The number that it is, None if it varies."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    @cached_property
    def _key(self) -> frozenset[tuple[Product, int]]:
        return frozenset(self.terms.items())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Expression) and self._key == other._key)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    # --- arithmetic ----------------------------------------------------------------------------------------------

    def __add__(self, other: Expression) -> Expression:
        return _sum(self, other)

    def __neg__(self) -> Expression:
        return Expression({product: -factor for product, factor in self.terms.items()})

    def __sub__(self, other: Expression) -> Expression:
        return self + -other

    def __mul__(self, other: Expression) -> Expression:
        return _product(self, other)

    def __floordiv__(self, divisor: Expression) -> Expression:
        return _divided(self, divisor)

    def _divided(self, divisor: Expression) -> Expression:
        if not divisor.terms:
            raise ZeroDivisionError("integer division or modulo by zero")
        whole, rest = self._parted(divisor)
        if not rest.terms:
            return whole
        if rest.number is not None and divisor.number is not None:
            return whole + Expression.of(rest.number // divisor.number)
        if divisor.number is not None and divisor.number < 0:
            rest, divisor = -rest, -divisor
        return whole + _quotient(rest, divisor)

    def __mod__(self, divisor: Expression) -> Expression:
        return self - self // divisor * divisor

    def _parted(self, divisor: Expression) -> tuple[Expression, Expression]:
        """The terms that a divisor of one term goes into, divided by it, and the others."""
        if (multiple := self._over(divisor)) is not None:
            return multiple, Expression({})
        whole: dict[Product, int] = {}
        rest: dict[Product, int] = {}
        ((by, factor),) = divisor.terms.items() if len(divisor.terms) == 1 else (((), 0),)
        for product, own in self.terms.items():
            left = _without(product, by) if factor and own % factor == 0 else None
            if left is None:
                rest[product] = own
            else:
                whole[left] = own // factor
        return Expression(whole), Expression(rest)

    def _over(self, divisor: Expression) -> Expression | None:
        """The sum of which this is the product with a divisor of several terms; None if there is none."""
        if len(divisor.terms) < 2:
            return None
        first, factor = max(divisor.terms.items(), key=_order)
        whole, rest = Expression({}), self
        while rest.terms:
            product, own = max(rest.terms.items(), key=_order)
            left = _without(product, first) if own % factor == 0 else None
            if left is None:
                return None
            part = Expression({left: own // factor})
            whole, rest = whole + part, rest - part * divisor
        return whole

    # --- what is known ---------------------------------------------------------------------------------------------

    def at(self, sizes: Mapping[str, int]) -> int:
        """Its value for these sizes."""
        return sum(
            factor * math.prod(_value(atom, sizes) for atom in product)
            for product, factor in self.terms.items()
        )

    def given(self, sizes: Mapping[str, int]) -> Expression:
        """What it is with these sizes as numbers; the others vary."""
        found = _of(0)
        for product, factor in self.terms.items():
            term = _of(factor)
            for atom in product:
                term = term * _given(atom, sizes)
            found = found + term
        return found

    @property
    def is_product_sum(self) -> bool:
        """True if there is no quotient in it."""
        return all(isinstance(atom, str) for product in self.terms for atom in product)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        found = set[str]()
        for atom in {atom for product in self.terms for atom in product}:
            found.update([atom] if isinstance(atom, str) else atom.dividend.names() + atom.divisor.names())
        return tuple(sorted(found))

    def names(self) -> tuple[str, ...]:
        """The sizes in it, in order."""
        return self._names

    @cached_property
    def least(self) -> int | None:
        """A number that it never falls below, whatever the sizes; None if none is known.

        With n + 2 in place of each size n, a sum without negative terms is smallest where all sizes are.
        """
        moved = Expression({})
        for product, factor in self.terms.items():
            term = Expression.of(factor)
            for atom in product:
                smallest = SMALLEST if isinstance(atom, str) else _least_quotient(atom)
                if smallest is None:
                    return None
                term = term * Expression({(atom,): 1, **({(): smallest} if smallest else {})})
            moved = moved + term
        if any(factor < 0 for product, factor in moved.terms.items() if product):
            return None
        return moved.terms.get((), 0)

    # --- as text -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Python over the names."""
        return self._text

    __repr__ = __str__

    @cached_property
    def _text(self) -> str:
        text = ""
        for product, factor in sorted(self.terms.items(), key=lambda term: (-len(term[0]), str(term[0]))):
            size = abs(factor)
            parts = [*map(str, product)] if size == 1 and product else [*map(str, product), str(size)]
            sign = " - " if factor < 0 else " + "
            text += (sign if text else "-" if factor < 0 else "") + " * ".join(parts)
        return text or "0"

    def as_part(self) -> str:
        """The same as an operand."""
        is_plain = self.number is not None or (list(map(len, self.terms)) == [1] and 1 in self.terms.values())
        return str(self) if is_plain else f"({self})"


@lru_cache(_REMEMBERED)
def _of(item: int | str) -> Expression:
    if isinstance(item, str):
        return Expression({(item,): 1})
    return Expression({(): item} if item else {})


@lru_cache(_REMEMBERED)
def _sum(left: Expression, right: Expression) -> Expression:
    return _summed([*left.terms.items(), *right.terms.items()])


@lru_cache(_REMEMBERED)
def _product(left: Expression, right: Expression) -> Expression:
    return _summed(
        (tuple(sorted((*own, *other), key=str)), a * b)
        for own, a in left.terms.items()
        for other, b in right.terms.items()
    )


@lru_cache(_REMEMBERED)
def _divided(dividend: Expression, divisor: Expression) -> Expression:
    return dividend._divided(divisor)


def _quotient(dividend: Expression, divisor: Expression) -> Expression:
    """`(n // 2) // 3` is `n // 6`, and `n // (n + 1)` is 0."""
    if outcome(operator.ge, dividend, _of(0)) and outcome(operator.lt, dividend, divisor):
        return _of(0)
    ((product, factor), *others) = dividend.terms.items()
    inner = product[0] if len(product) == 1 and factor == 1 and not others else None
    if isinstance(inner, Quotient) and min(divisor.number or 0, inner.divisor.number or 0) > 0:
        return inner.dividend // (inner.divisor * divisor)
    return Expression({(Quotient(dividend, divisor),): 1})


@lru_cache(_REMEMBERED)
def outcome(target: Callable[[int, int], object], left: Expression, right: Expression) -> bool | None:
    """The outcome of a comparison that is the same for all sizes; None if it is not."""
    for one, other, sign in ((left, right, -1), (right, left, 1)):
        if one.number is None and (other.number or 0) >= _LARGEST:
            return bool(target(sign, 0))
    difference = left - right
    least, most = difference.least, (-difference).least
    signs = [
        sign
        for sign in (-1, 0, 1)
        if (least is None or sign >= min(least, 1)) and (most is None or sign <= max(-most, -1))
    ]
    found = {bool(target(sign, 0)) for sign in signs}
    return found.pop() if len(found) == 1 else None


def _summed(terms: Iterable[tuple[Product, int]]) -> Expression:
    found: dict[Product, int] = {}
    for product, factor in terms:
        found[product] = found.get(product, 0) + factor
    return Expression({product: factor for product, factor in found.items() if factor})


def _order(term: tuple[Product, int]) -> tuple[int, list[tuple[int, ...]]]:
    """An order of products that stays when both are multiplied by a third: by how many atoms, then by the atoms."""
    product = term[0]
    return len(product), [tuple(-ord(sign) for sign in str(atom)) for atom in product]


def _without(product: Product, by: Product) -> Product | None:
    """A product divided by another one, None if that is no part of it."""
    left = list(product)
    for atom in by:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _value(atom: Atom, sizes: Mapping[str, int]) -> int:
    if isinstance(atom, str):
        return sizes[atom]
    return atom.dividend.at(sizes) // atom.divisor.at(sizes)


def _given(atom: Atom, sizes: Mapping[str, int]) -> Expression:
    if isinstance(atom, Quotient):
        return atom.dividend.given(sizes) // atom.divisor.given(sizes)
    return _of(sizes.get(atom, atom))


def _least_quotient(atom: Quotient) -> int | None:
    """None if it may be negative."""
    dividend, divisor = atom.dividend.least, atom.divisor.least
    if dividend is None or dividend < 0 or divisor is None or divisor < 1:
        return None
    number = atom.divisor.number
    return dividend // number if number is not None else 0
