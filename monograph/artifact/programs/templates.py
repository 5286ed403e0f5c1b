"""Programs for a range of sizes: captured at several, and joined where only numbers differ.

A number that is another one at another size becomes `{"$size": expression}` if one polynomial in the sizes, or a number
divided by one, gives it at every size that was looked at; else the step is no template. `instance` puts the numbers back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import combinations, product, zip_longest
from typing import Final

from monograph.artifact.programs import expressions
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import Json, check
from monograph.sizes.expression import Expression
from monograph.sizes.size import Size

SIZES: Final = "sizes"  # the list that expressions take them from
_TAG: Final = "$size"
_MAX_DEPTH: Final = 400
_BETWEEN: Final = (
    7  # above the smallest size, where the third capture looks: odd, so that no half passes for whole
)

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """What was captured at some sizes."""

    sizes: Sizes
    value: Json


class NoTemplateError(Exception):
    """Two captures differ in more than numbers, or in numbers that follow no rule; says where, with the name of the `node`."""

    def __init__(self, text: str, node: str = "") -> None:
        super().__init__(text)
        self.node = node


def points(ranges: Sequence[tuple[int, int]]) -> list[Sizes]:
    """The sizes to capture at: every corner of the ranges, and one place inside."""
    corners = list(dict.fromkeys(product(*((low, high) for low, high in ranges))))
    inside = tuple(min(high, low + _BETWEEN + 2 * index) for index, (low, high) in enumerate(ranges))
    return corners if inside in corners else [*corners, inside]


def join(samples: Sequence[Sample]) -> Json:
    """One JSON for all samples. Raises NoTemplateError."""
    values, sizes = [sample.value for sample in samples], [sample.sizes for sample in samples]
    if type(values[0]) is not dict or "nodes" not in values[0]:
        return _joined(values, sizes, "")
    _check_ops(values, sizes)
    try:
        return _joined(values, sizes, "")
    except NoTemplateError as error:
        rows = {row[0]: row for row in values[0]["nodes"]}
        if error.node not in rows:
            raise
        raise NoTemplateError(f"{error}, at {_place(rows[error.node], values[0])}") from None


def _check_ops(programs: Sequence[Json], sizes: Sequence[Sizes]) -> None:
    """Raise NoTemplateError for programs with other ops; it names the first."""
    for program, size in zip(programs, sizes, strict=True):
        for first, other in zip_longest(programs[0]["nodes"], program["nodes"]):
            if first is None or other is None or first[1] != other[1]:
                of, at = (program, other) if other is not None else (programs[0], first)
                where = size if other is not None else sizes[0]
                raise NoTemplateError(f"it has other ops from {_place(at, of)} on, for {_shown(where)}")


def _place(row: Json, program: Json) -> str:
    """The op of a node, and the line that it comes from, if it is known."""
    op = row[1] if type(row[1]) is str else row[0]
    _, module, file, line = program["origins"][row[4]]
    inside = f", module {module}" if module else ""
    return f"{op} ({file}:{line}{inside})" if file else op


def by_names(value: Json, names: Sequence[str]) -> Json:
    """A JSON with sizes that vary among its numbers as a template over these names."""
    match value:
        case Size():
            return {_TAG: _expression(value.expression, names)}
        case list():
            return [by_names(item, names) for item in value]
        case dict():
            return {key: by_names(item, names) for key, item in value.items()}
    return value


def _expression(expression: Expression, names: Sequence[str]) -> Json:
    terms: list[Json] = []
    for atoms, factor in expression.terms.items():
        term: Json = factor if factor != 1 or not atoms else None
        for atom in atoms:
            part: Json
            if isinstance(atom, str):
                part = [SIZES, names.index(atom)]
            else:
                part = ["//", _expression(atom.dividend, names), _expression(atom.divisor, names)]
            term = part if term is None else ["*", term, part]
        terms.append(term)
    return reduce(lambda one, other: ["+", one, other], terms) if terms else 0


def instance(value: Json, sizes: Sizes, depth: int = _MAX_DEPTH) -> Json:
    """The JSON at some sizes."""
    check(depth > 0, "a program is nested too deep")
    if type(value) is list:
        return [instance(item, sizes, depth - 1) for item in value]
    if type(value) is not dict:
        return value
    if _TAG in value and len(value) == 1:
        expression = expressions.from_json(value[_TAG], {SIZES: len(sizes)})
        try:
            return expression({SIZES: sizes})
        except (ArithmeticError, TypeError, ValueError) as error:
            raise Damaged(f"a size cannot be computed: {error}") from None
    return {key: instance(item, sizes, depth - 1) for key, item in value.items()}


def _joined(values: Sequence[Json], sizes: Sequence[Sizes], path: str) -> Json:
    first = values[0]
    if all(type(item) is type(first) and item == first for item in values) and not isinstance(
        first, (list, dict)
    ):
        return first
    kinds = set(map(type, values))
    if kinds == {list} and len(set(map(len, values))) == 1:
        if len(first) > 5 and isinstance(first[0], str) and isinstance(first[3], dict):
            path = first[0]  # the name of a node
        return [_joined(items, sizes, path) for items in zip(*values, strict=True)]
    if kinds == {dict} and len(set(map(tuple, values))) == 1:
        return {key: _joined([item[key] for item in values], sizes, path) for key in first}
    if kinds == {int}:
        return {_TAG: _polynomial(values, sizes, path)}
    if kinds == {float}:
        return {_TAG: _quotient(values, sizes, path)}
    raise _difference(values, sizes, path)


def _difference(values: Sequence[Json], sizes: Sequence[Sizes], path: str) -> NoTemplateError:
    for item, size in zip(values, sizes, strict=True):
        if item != values[0]:
            lists = type(item) is type(values[0]) is list and len(item) != len(values[0])
            first, other = (f"{len(v)} entries" if lists else str(v)[:60] for v in (values[0], item))
            text = f"it differs: {first} for {_shown(sizes[0])}, {other} for {_shown(size)}"
            return NoTemplateError(text, path)
    return NoTemplateError("it differs", path)


def _shown(sizes: Sizes) -> str:
    return " x ".join(map(str, sizes))


def _monomials(sizes: Sequence[Sizes]) -> list[tuple[int, ...]]:
    """Every product of different sizes that vary: (), (0,), (1,), (0, 1)."""
    varied = [index for index, column in enumerate(zip(*sizes, strict=True)) if len(set(column)) > 1]
    return [pick for count in range(len(varied) + 1) for pick in combinations(varied, count)]


def _polynomial(values: Sequence[int], sizes: Sequence[Sizes], path: str) -> Json:
    """The polynomial with whole coefficients, linear in each size, through all values."""
    monomials = _monomials(sizes)
    rows = [[_product(size, pick) for pick in monomials] for size in sizes]
    coefficients = _solved(rows, [Fraction(item) for item in values])
    if coefficients is None or any(item.denominator != 1 for item in coefficients):
        raise _difference(values, sizes, path)
    terms: list[Json] = [
        _term(int(factor), pick) for factor, pick in zip(coefficients, monomials, strict=True) if factor
    ]
    total = terms[0]
    for term in terms[1:]:
        total = ["+", total, term]
    return total


def _quotient(values: Sequence[float], sizes: Sequence[Sizes], path: str) -> Json:
    """A number divided by a product of sizes, as the mean over a batch has it."""
    for pick in _monomials(sizes)[1:]:
        number = float(round(values[0] * _product(sizes[0], pick), 9))
        if all(number / _product(size, pick) == item for item, size in zip(values, sizes, strict=True)):
            return ["/", number, _term(1, pick)]
    raise _difference(values, sizes, path)


def _product(sizes: Sizes, pick: tuple[int, ...]) -> int:
    found = 1
    for index in pick:
        found *= sizes[index]
    return found


def _term(factor: int, pick: tuple[int, ...]) -> Json:
    if not pick:
        return factor
    term: Json = [SIZES, pick[0]]
    for index in pick[1:]:
        term = ["*", term, [SIZES, index]]
    return term if factor == 1 else ["*", factor, term]


def _solved(rows: list[list[int]], values: list[Fraction]) -> list[Fraction] | None:
    """The solution of equations of which there are more than unknowns; None if there is none, or not only one."""
    table = [[*map(Fraction, row), value] for row, value in zip(rows, values, strict=True)]
    width = len(rows[0])
    for column in range(width):
        pivot = next((row for row in range(column, len(table)) if table[row][column]), None)
        if pivot is None:
            return None
        table[column], table[pivot] = table[pivot], table[column]
        table[column] = [item / table[column][column] for item in table[column]]
        for row in range(len(table)):
            if row != column and (factor := table[row][column]):
                table[row] = [a - factor * b for a, b in zip(table[row], table[column], strict=True)]
    if any(row[width] for row in table[width:]):
        return None
    return [row[width] for row in table[:width]]
