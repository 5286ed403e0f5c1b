"""Moving numbers as Python and torch meet them: all that a float or an int can do.

Arithmetic gives other moving numbers; a comparison or a truth value is decided; what leaves them (`float(x)`, `hash(x)`, a
text, C code that takes a float) is the present value, on the condition that it is this very value.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from monograph.capture.numbers.arithmetic import SIGNS
from monograph.capture.numbers.moving import Node, decide, is_moving, number_of, plain, stands_for, value_of
from monograph.capture.numbers.ratios import ceil, floor
from monograph.capture.numbers.recorded_arithmetic import apply, floor_divided, power, times, to_float
from monograph.compat.symbolic_numbers import SYMBOLIC_MATH, SymNode
from monograph.user_code.files import is_inside

_PLAIN = (int, float, bool)


_is_torchs = cache(is_inside)


def _asked_by_torch() -> bool:
    return _is_torchs(sys._getframe(2).f_code.co_filename)


def _operand(item: Any) -> Any:
    """The other side of an operation: a number that moves or a plain one, None for a number of torch's."""
    if is_moving(item) or type(item) in _PLAIN:
        return item
    if isinstance(item, (torch.SymFloat, torch.SymInt, torch.SymBool)):
        return None
    if isinstance(item, _PLAIN) and type(item).__module__ != "numpy":  # an IntEnum
        return int(item) if isinstance(item, int) else float(item)
    return NotImplemented


def _arithmetic(name: str, act: Callable[[Any, Any], Any], plainly: Callable[[Any, Any], Any]) -> Any:
    """The methods `__name__` and `__rname__`."""

    def made(method: str, order: int) -> Callable[[Any, Any], Any]:
        def run(self: Any, other: Any) -> Any:
            item = _operand(other)
            if item is None:  # a number out of a tensor, whose value nobody knows yet
                return getattr(super(_Number, self), method)(other)
            if item is NotImplemented:
                if not _takes_floats(other):
                    return NotImplemented
                return plainly(*(plain(self), other)[::order])
            return act(*(self, item)[::order])

        return run

    return {f"__{name}__": made(f"__{name}__", 1), f"__r{name}__": made(f"__r{name}__", -1)}


def _takes_floats(item: Any) -> bool:
    """True for objects whose own methods, written in C, would refuse a number that is no float of Python's."""
    return isinstance(item, complex) or type(item).__module__ in ("datetime", "decimal")


def _comparison(target: Any, method: str) -> Any:
    def run(self: Any, other: Any) -> Any:
        item = _operand(other)
        if item is None:
            return getattr(super(_Number, self), method)(other)
        if item is NotImplemented:
            return target(plain(self), other) if _takes_floats(other) else NotImplemented
        return decide(target, self, item)

    return run


def _held(name: str) -> Any:
    """A method of plain numbers, of the present value."""

    def run(self: Any, *others: Any) -> Any:
        return getattr(plain(self), name)(*map(plain, others))

    return run


class _Number:
    """What floats and ints have in common."""

    node: Node

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """Numbers have none: `hasattr(x, "__dict__")` is a way to distinguish objects from them."""
        raise AttributeError("__dict__")

    def __bool__(self) -> bool:
        return decide(operator.ne, self, 0)

    def __hash__(self) -> int:
        return hash(plain(self))

    def __float__(self) -> float:
        return float(plain(self))

    def __complex__(self) -> complex:
        return complex(plain(self))

    def __neg__(self) -> Any:
        return apply(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return apply(operator.abs, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __str__(self) -> str:
        return self.node.name if _asked_by_torch() else str(plain(self))

    def __repr__(self) -> str:
        return self.node.name if _asked_by_torch() else repr(plain(self))

    def __format__(self, form: str) -> str:
        return self.node.name if _asked_by_torch() else format(plain(self), form)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _memo: Any) -> Any:
        return self

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError("a number that moves has no bytes of its own")  # a trace with plain numbers follows

    def __sizeof__(self) -> int:
        return self.node.pytype(1).__sizeof__()  # type: ignore[no-any-return]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return sys.modules["numpy"].asarray(plain(self), dtype=dtype)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(function, method)(*map(plain, inputs), **options)

    @property
    def real(self) -> Any:
        return self

    @property
    def imag(self) -> Any:
        return self.node.pytype(0)

    def conjugate(self) -> Any:
        return self

    def __sym_float__(self) -> Any:
        return to_float(self)


for _name, _act, _plainly in (
    ("add", lambda a, b: apply(operator.add, a, b), operator.add),
    ("sub", lambda a, b: apply(operator.sub, a, b), operator.sub),
    ("mul", times, operator.mul),
    ("truediv", lambda a, b: apply(operator.truediv, a, b), operator.truediv),
    ("floordiv", floor_divided, operator.floordiv),
    ("mod", lambda a, b: apply(operator.mod, a, b), operator.mod),
    ("pow", power, operator.pow),
):
    for _method, _run in _arithmetic(_name, _act, _plainly).items():
        setattr(_Number, _method, _run)
for _name, _target in (("sym_max", torch.sym_max), ("sym_min", torch.sym_min)):
    setattr(_Number, f"__{_name}__", _arithmetic(_name, partial(apply, _target), _target)[f"__{_name}__"])
for _target in SIGNS:
    setattr(_Number, f"__{_target.__name__}__", _comparison(_target, f"__{_target.__name__}__"))


class MovingFloat(_Number, torch.SymFloat):
    """A float that moves. `isinstance(x, float)` is true for all code but torch's, which takes it for its own."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return MovingFloat if _asked_by_torch() else float

    def __trunc__(self) -> Any:
        return plain(
            apply(math.trunc, self)
        )  # sizes and places are made of whole numbers, and no program moves those

    __int__ = __trunc__

    def __floor__(self) -> Any:
        return plain(apply(math.floor, self)) if (whole := floor(self)) is None else whole

    def __ceil__(self) -> Any:
        return plain(apply(math.ceil, self)) if (whole := ceil(self)) is None else whole

    def __round__(self, digits: int | None = None) -> Any:
        return round(plain(self), digits)

    def is_integer(self) -> bool:
        return decide(operator.eq, apply(operator.mod, self, 1), 0)

    as_integer_ratio = _held("as_integer_ratio")
    hex = _held("hex")


class MovingInt(_Number, torch.SymInt):
    """An int that moves."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return MovingInt if _asked_by_torch() else int

    def __int__(self) -> int:
        return int(plain(self))

    def __trunc__(self) -> Any:
        return self

    __index__ = __int__
    __floor__ = __ceil__ = __trunc__
    numerator = property(__trunc__)
    denominator = 1


for _method in [
    "__and__",
    "__rand__",
    "__or__",
    "__ror__",
    "__xor__",
    "__rxor__",
    "__lshift__",
    "__rlshift__",
    "__rshift__",
    "__rrshift__",
    "__invert__",
    "__round__",
    "as_integer_ratio",
    "bit_length",
    "bit_count",
    "to_bytes",
]:
    setattr(MovingInt, _method, _held(_method))


stands_for(float, MovingFloat)
stands_for(int, MovingInt)


# --- what torch does to them by their nodes, from C++ and in kernels for fake tensors -----------------------------------


def _undecided(target: Any) -> Callable[..., Any]:
    """A comparison by torch's code, which may only wonder whether it holds for every value."""

    def run(*items: Any) -> Any:
        moving = next(item.node.moving for item in items if is_moving(item))
        return torch.SymBool(Node(moving, target(*map(value_of, items)), target, items))

    return run


def _of_node(act: Callable[..., Any], name: str) -> Callable[..., Any]:
    theirs = getattr(SymNode, name, None)

    def run(self: Node, *others: Any) -> Any:
        items = []
        for other in others:
            if not isinstance(other, Node) and isinstance(other, SymNode) and other.constant is None:
                return theirs(self, *others)  # type: ignore[misc]  # a number of torch's
            item = number_of(other) if isinstance(other, Node) else getattr(other, "constant", other)
            items.append(item)
        return _handed_on(self, act(number_of(self), *items))

    return run


def _handed_on(node: Node, made: Any) -> Any:
    """The node of a result, as torch hands it on."""
    if is_moving(made) or isinstance(made, torch.SymBool):
        return made.node
    return getattr(node, f"wrap_{type(made).__name__}")(made)


class _Constant(SymNode):  # type: ignore[misc]
    """A plain number on the left of one that moves, as code of torch has it: `1.0 / number`."""


def _of_constant(act: Callable[..., Any], name: str) -> Callable[..., Any]:
    theirs = getattr(SymNode, name, None)

    def run(self: _Constant, *others: Any) -> Any:
        if others and isinstance(others[0], Node):
            return _handed_on(others[0], act(self.constant, number_of(others[0])))
        return theirs(self, *others)  # type: ignore[misc]

    return run


def _wrapped(name: str) -> Callable[..., Any]:
    theirs = getattr(SymNode, name)

    def wrap(self: Node, number: Any) -> Any:
        made = theirs(self, number)
        made.__class__ = _Constant
        return made

    return wrap


_BY_NODE: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "mod", "neg", "abs", "pos")},
    **dict.fromkeys(("truediv", "float_truediv", "int_truediv"), operator.truediv),
    **dict.fromkeys(("floordiv", "int_floordiv"), operator.floordiv),
    **dict.fromkeys(("pow", "float_pow", "pow_by_natural"), operator.pow),
    **{target.__name__: _undecided(target) for target in SIGNS},
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "sym_int": math.trunc,
    "round": builtins.round,
    "is_integer": lambda number: number.is_integer(),
    "sym_float": to_float,
    "sym_max": lambda a, b: apply(torch.sym_max, a, b),
    "sym_min": lambda a, b: apply(torch.sym_min, a, b),
    **{f"sym_{name}": partial(apply, target) for name, target in SYMBOLIC_MATH.items()},
}
for _name in _BY_NODE:
    setattr(Node, _name, _of_node(_BY_NODE[_name], _name))
    setattr(_Constant, _name, _of_constant(_BY_NODE[_name], _name))
for _name in ("wrap_int", "wrap_float"):
    setattr(Node, _name, _wrapped(_name))
