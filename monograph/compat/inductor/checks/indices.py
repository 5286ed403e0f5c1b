"""What can fail in Inductor's kernels: the checks of indices in loops, and kernels of torch's that look at values.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from monograph.compat.inductor.checks.any_values import SPACES_OF_ANY_VALUES, TAKE_ANY_VALUES

_CLASSES = {"MultiOutput", "DeviceCopy", "InplaceCopyFallback", "NativeNode", "RandomSeeds", "WritingNode"}
# each element of their result depends on the same element of the arguments
_POINTWISE = """
    constant to_dtype where eq ne lt le gt ge add sub mul neg abs minimum maximum logical_and logical_or logical_not
    bitwise_and bitwise_or bitwise_xor bitwise_not identity
"""
_DIVISIONS = ("floordiv", "truncdiv", "remainder", "mod")
_NOT_ZERO = re.compile(r"(to_dtype\()?constant\(-?(?!0\b)\d")


@dataclass(frozen=True)
class Check:
    """A check of indices: `key` says what is looked at and for which size, empty if that is not known.

    With `of_all`, it looks at all elements of what it loads: one with the same key looks at nothing else.
    """

    key: str = ""
    takes_negative: bool = False  # counted from the end
    of_all: bool = False

    def covers(self, other: Check) -> bool:
        """True if the other one cannot fail when this one has not."""
        same = bool(self.key) and self.key == other.key and self.of_all
        return same and (other.takes_negative or not self.takes_negative)


def fails_on_values(kernel: Any) -> bool:
    """True if a kernel of torch, or one of somebody else, may refuse the values that it gets."""
    names = {item.__name__ for item in type(kernel).__mro__}
    if names & _CLASSES or type(kernel).__module__ == "torch._inductor.mkldnn_ir":
        return False
    op = getattr(kernel, "op_overload", None)
    if not isinstance(op, torch._ops.OpOverload):
        space, _, name = str(getattr(kernel, "python_kernel_name", None)).rpartition(".")
        return (
            space not in ("extern_kernels", "aten", "torch.ops.aten")
            or f"aten::{name}" not in TAKE_ANY_VALUES
        )
    name = op._schema.name
    known = name in TAKE_ANY_VALUES or f"{name}.{op._overloadname}" in TAKE_ANY_VALUES
    known = known or op.namespace in SPACES_OF_ANY_VALUES
    return not known and not (op.namespace == "aten" and _is_arithmetic(op, kernel))


def _is_arithmetic(op: Any, kernel: Any) -> bool:
    """True for arithmetic on floats and complex numbers; on integers, division by zero fails."""
    if torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    try:
        operands = [*kernel.inputs, kernel]
        dtypes: list[torch.dtype] = [item.get_dtype() for item in operands]
    except (AttributeError, NotImplementedError, AssertionError):
        return False
    return all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def checks_in(body: Any, changed: Set[str]) -> Sequence[Check] | None:
    """The checks of indices in a loop; None if it can fail in other ways. `changed` are buffers with more than one value."""
    if any(body.has_op(name) for name in ("device_assert_async", "check_bounds")):
        return None
    found: list[Check] = _recorded(body, changed).found if body.has_op("indirect_indexing") else []
    return None if divides(body) else found


def divides(body: Any) -> bool:
    """True if a loop divides by what may be the integer zero. That is reported when the function that it is in ends."""
    return any(body.has_op(name) for name in _DIVISIONS) and bool(_recorded(body, frozenset()).divides)


def _recorded(body: Any, changed: Set[str]) -> Any:
    """A loop, run by a recorder."""
    virtualized: Any = importlib.import_module("torch._inductor.virtualized").V
    # Inductor's classes are there only once it is imported; ours comes first, so that its methods win
    handler: Any = importlib.import_module("torch._inductor.ops_handler").DefaultHandler
    recorder = type("Recorder", (_Recorder, handler), {})(body, changed, virtualized)
    with virtualized.set_ops_handler(recorder):
        body(*body.vars, allow_same_symbol_in_index=True)
    return recorder


@dataclass(frozen=True)
class _Term:
    """What a value in a loop is computed by; `places` are the loads that it depends on. Opaque: by something else too."""

    text: str
    places: frozenset[tuple[str, Any]] = frozenset()
    is_opaque: bool = False

    def __getitem__(self, _number: int) -> _Term:
        return _Term(self.text, self.places, True)


class _Recorder:
    """The methods of a handler of Inductor's that notes checks, in the place of those that its class has."""

    def __init__(self, body: Any, changed: Set[str], virtualized: Any) -> None:
        self._body, self._changed, self._virtualized = body, changed, virtualized
        self._bounds: Mapping[Any, Any] = body.bounds().get_bounds()
        self._masks = 0
        self.found: list[Check] = []
        self.divides = False

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        if name in _DIVISIONS and not _NOT_ZERO.match(getattr(given[1], "text", "")):
            self.divides = True
        terms = [item for item in given if isinstance(item, _Term)]
        places = frozenset(place for item in terms for place in item.places)
        text = ", ".join(item.text if isinstance(item, _Term) else repr(item) for item in given)
        opaque = name not in _POINTWISE.split() or any(item.is_opaque for item in terms)
        return _Term(f"{name}({text})", places, opaque)

    def load(self, name: str, index: Any) -> _Term:
        return _Term(f"load({name})", frozenset([(name, index)]), name in self._changed)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> _Term:
        self._masks += 1
        body()
        self._masks -= 1
        return _Term("masked", is_opaque=True)

    def indirect_indexing(self, index: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        sympy: Any = importlib.import_module("sympy")
        if check and not self._is_known(size, wrap_neg):
            self.found.append(self._check(index, size, wrap_neg))
        return sympy.Dummy("indirect", integer=True)

    def _is_known(self, size: Any, wrap_neg: bool) -> bool:
        """True if the range of the index is known, and fits."""
        call = self._virtualized.interpreter.current_node
        bounds = self._bounds.get(call.args[0]) if call is not None and call.args else None
        if bounds is None or not getattr(size, "is_number", False):
            return False
        return bool(bounds.lower >= (-size if wrap_neg else 0)) and bool(bounds.upper < size)

    def _check(self, index: Any, size: Any, wrap_neg: bool) -> Check:
        if not isinstance(index, _Term) or index.is_opaque or len({at for _, at in index.places}) != 1:
            return Check()
        whole = not self._masks and all(self._is_whole(*place) for place in index.places)
        return Check(f"{index.text} in {size}", wrap_neg, whole)

    def _is_whole(self, name: str, index: Any) -> bool:
        """True if the loop looks at each element of a buffer."""
        ranges = self._body.var_ranges
        steps = {symbol: index.coeff(symbol) for symbol in index.free_symbols}
        if not all(symbol in ranges for symbol in steps):
            return False
        if (index - sum(symbol * step for symbol, step in steps.items())).expand() != 0:
            return False
        size = 1
        for symbol, step in sorted(steps.items(), key=lambda item: item[1]):
            if step != size:
                return False
            size *= ranges[symbol]
        count = math.prod(self._virtualized.graph.get_buffer(name).get_size())
        return bool(size == count)
