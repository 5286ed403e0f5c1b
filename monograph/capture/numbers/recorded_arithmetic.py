"""Arithmetic on numbers that may move between steps: computed as Python does, and recorded in the trace."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.capture.numbers.arithmetic import OPERATIONS
from monograph.capture.numbers.moving import (
    LONGEST,
    Moving,
    Node,
    decide,
    is_moving,
    kind_of,
    names_in,
    number_of,
    plain,
    value_of,
)
from monograph.capture.numbers.sizes import computed
from monograph.compat.symbolic_numbers import is_recorded, record_number
from monograph.errors import CaptureError
from monograph.ir.call.numbers import spell_number


def apply(target: Any, *operands: Any) -> Any:
    """The result of an operation on numbers, some of which move."""
    key = (target, *(id(item.node) if is_moving(item) else (type(item), repr(item)) for item in operands))
    moving: Moving = next(item.node.moving for item in operands if is_moving(item))
    if key in moving.made:
        return _recorded(moving.made[key])
    if (size := computed(target, operands)) is not None:
        return _recorded(size) if is_moving(size) else size
    operation = OPERATIONS[target]
    value = _computed(operation.compute, operation.text, operands)
    if not all(item.node.is_known for item in operands if is_moving(item)):
        node = Node(moving, None, target, operands, kind=type(value))
    else:
        if isinstance(value, complex):
            return operation.compute(*map(plain, operands))
        node = Node(moving, value, target, operands)
    moving.made[key] = made = number_of(node)
    return _recorded(made)


def _computed(compute: Callable[..., Any], text: str, operands: Sequence[Any]) -> Any:
    """What an operation gives for the present values. If it raises, which build() may catch, that is a condition."""
    try:
        return compute(*map(_example, operands))
    except (ArithmeticError, ValueError) as error:
        _hold_raised(type(error), text, operands)
        raise


def _hold_raised(kind: type[Exception], text: str, operands: Sequence[Any]) -> None:
    nodes = [item.node for item in operands if is_moving(item)]
    known = [node for node in nodes if node.is_known]
    if len(known) < len(nodes) or sum(node.size for node in nodes) > LONGEST:
        for node in known:
            node.hold()
        return
    for node in nodes:
        if node.target is not None:
            node.hold_fine()  # else it may be an operand that raises
    texts = [item.node.text if is_moving(item) else spell_number(item) for item in operands]
    condition = f"raises({kind.__name__}, lambda: {text.format(*texts)})"
    nodes[0].moving.branches.note(condition, names_in(*nodes))


def _example(item: Any) -> Any:
    """The present value, or any number of the same kind."""
    return item.node.pytype(1) if is_moving(item) and not item.node.is_known else value_of(item)


def _recorded(number: Any) -> Any:
    """The number, in the trace that runs now if there is one: it may have been made where none ran."""
    node: Node = number.node
    if not is_recorded(number) and node.target is not None:
        for item in filter(is_moving, node.operands):
            _recorded(item)
        node.moving.note_recorded(node, record_number(number, node.target, node.operands))
    return number


def power(base: Any, exponent: Any) -> Any:
    """`base ** exponent`, on conditions that keep its kind: an int, a float or a complex number."""
    if is_moving(base) and not base.node.is_known and type(exponent) is int and exponent > 0:
        return apply(operator.pow, base, exponent)
    low, high = value_of(base), value_of(exponent)
    if isinstance(low, int) and isinstance(high, int):
        if is_moving(exponent):
            decide(operator.ge, exponent, 0)
    elif is_moving(exponent) or not float(high).is_integer():
        if is_moving(base) and (decay := _decay_in(base)) is not None:
            decay.node.need("{} <= 1.0")
        else:
            if low < 0:
                exponent = plain(exponent)
                _refuse_complex(low**high)
            if is_moving(base):
                decide(operator.lt, base, 0.0)
    moves = is_moving(base) or is_moving(exponent)
    return apply(operator.pow, base, exponent) if moves else base**exponent


def _refuse_complex(number: Any) -> None:
    """Ops in place take no complex number in eager mode, and would in a trace."""
    if isinstance(number, complex):
        raise CaptureError(
            "a power of a number that may move is complex, since the base is negative",
            hint="take the absolute value, or make it a constant: float(number)",
        )


def _decay_in(base: Any) -> Any:
    """The decay of `1 - decay ** step`, which is not negative while the decay is at most one: no counter is negative.

    A condition on the whole would read the counter of each parameter before each step. With a decay above one such a
    step has no meaning, and the condition reports it.
    """
    node: Node = base.node
    if node.target is not operator.sub or node.operands[0] != 1 or not is_moving(node.operands[1]):
        return None
    inner: Node = node.operands[1].node
    if inner.target is not operator.pow or not all(map(is_moving, inner.operands)):
        return None
    decay, step = inner.operands
    counts = step.node.target is None and step.node.symbol is not None
    return decay if counts and decay.node.target is None and decay.node.value >= 0 else None


def floor_divided(a: Any, b: Any) -> Any:
    """Of floats a constant: no compiler's `a // b` is Python's in the last place."""
    if float in (kind_of(a), kind_of(b)):
        return plain(a) // plain(b)
    return apply(operator.floordiv, a, b)


def times(a: Any, b: Any) -> Any:
    """One times a number is that number, without an op."""
    for one, other in ((a, b), (b, a)):
        if type(one) is int and one == 1:
            return other
    return apply(operator.mul, a, b)


def to_float(number: Any) -> Any:
    """A moving number as a moving float."""
    return number if isinstance(number, torch.SymFloat) else apply(torch.sym_float, number)


def math_power(base: Any, exponent: Any) -> Any:
    """`math.pow`, which raises where `**` gives a complex number, and another error than `**` for a power of zero."""
    _computed(math.pow, "math.pow({}, {})", (base, exponent))
    base_is_zero = decide(operator.eq, base, 0.0) if is_moving(base) else base == 0.0
    if base_is_zero and is_moving(exponent):
        decide(operator.lt, exponent, 0.0)
    return power(*(to_float(item) if is_moving(item) else float(item) for item in (base, exponent)))
