"""Functions of Python that take floats in C, or ask for their type: while a trace runs, they know moving numbers."""

from __future__ import annotations

import builtins
import importlib
import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch

from monograph.capture.guards.sources.closures import closure_of
from monograph.capture.guards.sources.same_objects import identity
from monograph.capture.numbers.moving import is_moving
from monograph.capture.numbers.protocol import MovingFloat, MovingInt
from monograph.capture.numbers.recorded_arithmetic import apply, math_power
from monograph.compat.fakes import is_fake
from monograph.compat.optimizers import ADAFACTOR
from monograph.compat.patching import replaced
from monograph.compat.symbolic_numbers import SYMBOLIC_MATH, is_symbolic, larger, smaller
from monograph.user_code.files import is_user_file

_ABSENT = object()
_COMPENSATED = sys.version_info >= (3, 12)  # sum() of floats is more exact than their additions from there on


@contextmanager
def functions_know_numbers(
    *owners: object, compared: Callable[[Any, Any], None], sizes_vary: bool = False
) -> Iterator[None]:
    """Inside, functions of `math`, `sum`, `type`, `id` and `len` treat numbers and tensors of a trace as what they stand for.

    `owners` are functions and objects of the user: their code may be in no module that Python has imported. `compared` is
    called with an object whose `id` is asked for, and None.
    """
    adafactor = importlib.import_module(ADAFACTOR)
    with ExitStack() as stack:
        for owner, name, function in (
            *((math, name, _unless_plain(getattr(math, name), act)) for name, act in _MATH.items()),
            (adafactor, "max", _unless_plain(larger, _among(torch.sym_max, larger))),
            (adafactor, "min", _unless_plain(smaller, _among(torch.sym_min, smaller))),
            *([(builtins, "sum", _sum)] if _COMPENSATED else []),
        ):
            stack.enter_context(replaced(owner, name, function))
        stack.enter_context(_objects_told(owners, compared, sizes_vary=sizes_vary))
        yield


def _unless_plain(plain: Callable[..., Any], act: Callable[..., Any]) -> Callable[..., Any]:
    """`plain` for arguments that are plain numbers or tensors, `act` if one of them moves."""

    def run(*items: Any) -> Any:
        tensors = any(isinstance(item, torch.Tensor) for item in items)
        return act(*items) if not tensors and any(map(is_symbolic, items)) else plain(*items)

    return run


def _of_math(target: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Of a number of torch's, or with a second argument, what torch or Python give."""
    return lambda item, *others: (
        apply(target, item) if is_moving(item) and not others else otherwise(item, *others)
    )


def _among(symbolic: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: otherwise(a, b) if _is_torchs(a) or _is_torchs(b) else apply(symbolic, a, b)


def _is_torchs(item: Any) -> bool:
    """True for a number of torch's, whose value nobody knows while the step is traced."""
    return is_symbolic(item) and not is_moving(item)


def _power(base: Any, exponent: Any) -> Any:
    if _is_torchs(base) or _is_torchs(exponent):
        return torch.sym_float(base) ** torch.sym_float(exponent)
    return math_power(base, exponent)


_MATH: dict[str, Callable[..., Any]] = {
    **{name: _of_math(target, target) for name, target in SYMBOLIC_MATH.items()},
    "exp": _of_math(math.exp, math.exp),
    "log": _of_math(math.log, math.log),
    "pow": _power,
    "isnan": lambda item: item != item,
    "isinf": lambda item: item in (math.inf, -math.inf),
    "isfinite": lambda item: -math.inf < item < math.inf,
}
_sum_plainly = sum


def _sum(items: Iterable[Any], /, start: Any = 0) -> Any:
    """`sum` of numbers as Python computes it: with what each addition has lost added at the end."""
    items = list(items)
    if not any(map(is_moving, items)) or not all(is_symbolic(i) or type(i) in (int, float) for i in items):
        return _sum_plainly(items, start)
    total, lost = start, 0.0
    for item in items:
        before, total = total, total + item
        if isinstance(before, (float, MovingFloat)):
            larger_first = (before, item) if abs(before) >= abs(item) else (item, before)
            lost = lost + ((larger_first[0] - total) + larger_first[1])
    return total + lost if lost and math.isfinite(lost) else total


# --- type(x) and id(x) -----------------------------------------------------------------------------------------------------


class _Type:
    """Stands for `type` in modules of the user: it is `type`, and gives the types that fakes stand for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = type(*args, **kwargs)
        if made is type and len(args) == 1:
            return self  # so that `type(cls) is type` holds
        if len(args) == 1 and is_fake(args[0]):
            return torch.nn.Parameter if isinstance(args[0], torch.nn.Parameter) else torch.Tensor
        return float if made is MovingFloat else int if made is MovingInt else made

    def __getattribute__(self, name: str) -> Any:
        return getattr(type, name)  # `type.__new__` of a metaclass too

    def __instancecheck__(self, item: object) -> bool:
        return isinstance(item, type)

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, type)

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        return (type,)

    def __getitem__(self, item: Any) -> Any:
        return type[item]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type

    def __eq__(self, other: object) -> bool:
        return other is self or other is type

    def __hash__(self) -> int:
        return hash(type)


def _length(item: Any) -> Any:
    """`len`, which of a tensor whose first size varies is that size: CPython takes a real int from `__len__`."""
    return item.shape[0] if is_fake(item) and item.dim() and is_moving(item.shape[0]) else len(item)


@contextmanager
def _objects_told(
    owners: Iterable[object], compared: Callable[[Any, Any], None], *, sizes_vary: bool
) -> Iterator[None]:
    """What `type(x)`, `id(x)` and `len(x)` are in code of the user: no object in Python can answer that for itself."""

    def identity_of(item: object, /) -> int:
        compared(item, None)
        return identity(item)

    replacements = {"type": _Type(), "id": identity_of, **({"len": _length} if sizes_vary else {})}
    found = {id(table): table for table in (*_MODULES.tables(), *_tables_of(owners))}
    places = [(table, name) for table in found.values() for name in replacements if name not in table]
    try:
        for table, name in places:
            table[name] = replacements[name]
        yield
    finally:
        for table, name in places:
            if table.get(name) is replacements[name]:
                del table[name]


class _UsersModules:
    """The names of the user's modules. While Python has imported nothing else, they are those of the last question."""

    def __init__(self) -> None:
        self._modules: list[Any] = []  # all of them, so that no other takes the place of one
        self._tables: list[dict[str, Any]] = []

    def tables(self) -> list[dict[str, Any]]:
        modules = list(sys.modules.values())
        known = self._modules
        if len(modules) != len(known) or not all(map(is_, modules, known)):
            self._tables = [*self._found()]
            self._modules = modules
        return self._tables

    def _found(self) -> Iterator[dict[str, Any]]:
        for name, module in list(sys.modules.items()):
            table = getattr(module, "__dict__", None)
            if isinstance(table, dict) and (name == "__main__" or _is_users(table.get("__file__"))):
                yield table


_MODULES = _UsersModules()  # a cache: there are thousands, and each trace asks


def _tables_of(owners: Iterable[object]) -> Iterator[dict[str, Any]]:
    """The names that functions know: the owners themselves, methods of their classes, and what they hold or close over."""
    pending, seen = deque(owners), set()
    while pending:
        item = pending.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        item = inspect.unwrap(item) if isinstance(item, FunctionType) else item
        if isinstance(item, MethodType):
            pending.append(item.__func__)
        elif isinstance(item, FunctionType):
            if _is_users(item.__code__.co_filename):
                yield item.__globals__
            pending.extend(filter(_is_function, closure_of(item).values()))
        else:
            tables = (
                vars(kind) for kind in type(item).__mro__ if kind.__module__.partition(".")[0] != "torch"
            )
            for table in (*tables, getattr(item, "__dict__", {})):
                pending.extend(filter(_is_function, table.values()))


def _is_function(item: object) -> bool:
    return isinstance(item, (FunctionType, MethodType))


@cache
def _is_users(file: object) -> bool:
    return isinstance(file, str) and is_user_file(file)
