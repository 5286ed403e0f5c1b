"""Expressions of sizes against Python's own arithmetic: the same values, and decisions that hold for all sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monograph.sizes.expression import SMALLEST, Expression, outcome

NAMES = ("b", "h", "w")
OPERATIONS: tuple[Callable[[Any, Any], Any], ...] = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
)
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
sizes = st.fixed_dictionaries({name: st.integers(SMALLEST, 40) for name in NAMES})
leaves = st.one_of(st.sampled_from(NAMES), st.integers(-4, 9))
programs = st.recursive(
    leaves, lambda inner: st.tuples(st.sampled_from(OPERATIONS), inner, inner), max_leaves=7
)


def computed(program: Any, leaf: Callable[[Any], Any]) -> Any:
    if not isinstance(program, tuple):
        return leaf(program)
    operation, left, right = program
    return operation(computed(left, leaf), computed(right, leaf))


def at(program: Any, values: dict[str, int]) -> int:
    found: int = computed(program, lambda item: values.get(item, item))
    return found


@given(programs, sizes)
def test_values_are_pythons(program: Any, values: dict[str, int]) -> None:
    try:
        expression = computed(program, Expression.of)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            at(program, values)
        return
    try:
        expected = at(program, values)
    except ZeroDivisionError:
        return  # by a size that is 0 for these values alone: a condition says that it is not
    assert expression.at(values) == expected
    assert eval(str(expression), {}, values) == expected
    assert eval(f"7 * {expression.as_part()}", {}, values) == 7 * expected


@given(programs, programs, st.sampled_from(COMPARISONS), st.lists(sizes, min_size=1, max_size=8))
def test_what_is_decided_holds_for_all_sizes(
    left: Any, right: Any, compare: Callable[[Any, Any], bool], many: list[dict[str, int]]
) -> None:
    try:
        first, second = (computed(program, Expression.of) for program in (left, right))
    except ZeroDivisionError:
        return
    decided = outcome(compare, first, second)
    for values in many:
        try:
            expected = compare(at(left, values), at(right, values))
        except ZeroDivisionError:
            continue
        assert decided in (None, expected)


@given(programs, programs, sizes)
def test_equal_expressions_have_equal_values(left: Any, right: Any, values: dict[str, int]) -> None:
    try:
        first, second = (computed(program, Expression.of) for program in (left, right))
        expected = at(left, values) == at(right, values)
    except ZeroDivisionError:
        return
    if first == second:
        assert expected
        assert hash(first) == hash(second)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("b * 64", "64 * b"),
        ("(h + 2 - 2 - 1) // 1 + 1", "h"),
        ("(h // 2) // 3", "h // 6"),
        ("(b * h * 4) // (h * 2)", "b * 2"),
        ("b // (b + 1)", "0"),
        ("(b * 8 + 8) // 4", "b * 2 + 2"),
    ],
)
def test_one_number_has_one_form(left: str, right: str) -> None:
    names = {name: Expression.of(name) for name in NAMES}

    def read(text: str) -> Expression:
        plain = eval(
            compile(text, "", "eval"), {"__builtins__": {}}, {k: _Lifted(v) for k, v in names.items()}
        )
        return plain.held if isinstance(plain, _Lifted) else Expression.of(plain)

    assert read(left) == read(right)


class _Lifted:
    """An expression that computes with plain numbers."""

    def __init__(self, held: Expression) -> None:
        self.held = held


def _lifted(act: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[Any, Any], _Lifted]:
    def run(self: _Lifted, other: Any) -> _Lifted:
        item = other.held if isinstance(other, _Lifted) else Expression.of(other)
        return _Lifted(act(*((item, self.held) if swapped else (self.held, item))))

    return run


for _act in OPERATIONS:
    _name = _act.__name__
    setattr(_Lifted, f"__{_name}__", _lifted(_act, swapped=False))
    setattr(_Lifted, f"__r{_name}__", _lifted(_act, swapped=True))


@given(programs, programs, sizes)
def test_a_product_is_divided_by_its_factor(left: Any, right: Any, values: dict[str, int]) -> None:
    try:
        factor, other = computed(left, Expression.of), computed(right, Expression.of)
        if factor.at(values) == 0:
            return
    except ZeroDivisionError:
        return
    assert (factor * other) // factor == other
    assert ((factor * other) % factor).number == 0


def test_long_expressions_are_written_once() -> None:
    expression = Expression.of("h")
    for _ in range(9):
        expression = (expression + Expression.of("w")) // (expression * expression + Expression.of(1))
    assert expression.names() == ("h", "w")
    assert expression.at({"h": 5, "w": 7}) == 0
    assert str(expression) is str(expression)
