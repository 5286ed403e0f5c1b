"""Ops that do the same in place, or for many tensors at once: found by their schemas, and tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.compat.ops import find_op, in_place_name, list_ops, schema_arguments, schema_of
from monograph.ir.ops.fused import IN_PLACE

_TENSOR, _TENSORS, _NUMBER, _NUMBERS = "Tensor", "List[Tensor]", "number", "List[number]"
_SPECIAL: Final = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e-42, 1.0, -2.5, 65504.0)
_NUMBERS_TRIED: Final[Mapping[str, tuple[Any, ...]]] = {
    "int": (3, -2, 1, 1000001),
    "small int": (3, -2, 1, 255),
    "float": (0.1, -1.7, 0.9, 1e-8),
    "bool": (True, False, True, True),
}
_AS_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Kind:
    """What counts of a call for the op on lists that does the same: its op, how many tensors it gets first, and what number after them.

    `number` is "float", "int", "small int" for one that any type of floats can hold, "bool", or empty; `named` is the name that
    it is given by, if it is given by one.
    """

    op: Any
    num_tensors: int
    number: str
    named: str
    dtype: torch.dtype


@dataclass(frozen=True)
class ListOp:
    """An op on lists of tensors; with `numbers` it takes a number for each tensor, or else one for all.

    With `as_tensors` it takes numbers as tensors of no dimension, of the type of the others: nothing is converted then for
    each of them.
    """

    op: Any
    named: str
    numbers: bool
    as_tensors: bool = False


@dataclass(frozen=True)
class NumberTensors:
    """A number as a tensor of no dimension, or several in a list."""

    numbers: Any
    dtype: torch.dtype

    def text(self, numbers: str) -> str:
        """The same in a generated function, where the numbers have this text."""
        made = f"torch.tensor({numbers}, dtype={self.dtype}, device='cpu')"
        return f"{made}.unbind()" if isinstance(self.numbers, list) else made

    def made(self) -> Any:
        """Them, if they are numbers already."""
        made = torch.tensor(self.numbers, dtype=self.dtype, device="cpu")
        return list(made.unbind()) if isinstance(self.numbers, list) else made


@cache
def op_in_place(op: Any) -> Any:
    """The op that writes what `op` gives into its first argument; None if there is none."""
    if op in IN_PLACE:
        return IN_PLACE[op]
    found = find_op(*in_place_name(op))
    if found is None or schema_arguments(found) != schema_arguments(op) or len(schema_of(found).returns) != 1:
        return None
    writes = [item.alias_info is not None and item.alias_info.is_write for item in schema_of(found).arguments]
    return found if writes[0] and not any(writes[1:]) else None


@cache
def op_on_lists(kind: Kind, *, in_place: bool, numbers: bool) -> ListOp | None:
    """The op that does for lists of tensors on the CPU what calls of this kind do one by one, bit for bit.

    With `numbers` each tensor has a number of its own. A name and a schema promise nothing: both ways are tried.
    """
    found = [item for op in list_ops(kind.op, in_place=in_place) for item in _fitting(op, kind, numbers)]
    found.sort(key=lambda item: not item.as_tensors)
    return next((item for item in found if _is_same(item, kind, in_place)), None)


def _fitting(op: Any, kind: Kind, numbers: bool) -> list[ListOp]:
    """In which way an op on lists takes what calls of this kind give; none if it does not."""
    arguments = schema_arguments(op)
    lists = next((i for i, item in enumerate(arguments) if item.kind != _TENSORS), len(arguments))
    needed = [item.kind for item in arguments[lists:] if item.default is None]
    if not kind.number:
        return [ListOp(op, "", False)] if lists == kind.num_tensors and not needed else []
    if kind.num_tensors == 1 and kind.number in ("float", "small int") and not kind.named:
        given = (2, []) if numbers else (1, [_TENSOR])
        if (lists, needed) == given:
            return [ListOp(op, "", numbers, as_tensors=True)]
    rest = arguments[lists:]
    if lists != kind.num_tensors or [item.kind for item in rest] != [_NUMBERS if numbers else _NUMBER]:
        return []
    return [ListOp(op, rest[0].name if schema_of(op).arguments[-1].kwarg_only else "", numbers)]


def _is_same(list_op: ListOp, kind: Kind, in_place: bool) -> bool:
    """True if the op on lists gives the bits of single calls for values of all sorts, in place or not."""
    shapes = ((), (7,), (41,), (301,))  # with all special values, and ends that fill no vector
    numbers = list(_NUMBERS_TRIED.get(kind.number, ()))
    if not list_op.numbers:
        numbers = numbers[:1] * len(shapes)
    try:
        with outside_of_modes(), outside_of_function_modes(), torch.no_grad():
            lists = [
                [_values(kind.dtype, shape, seed) for shape in shapes] for seed in range(kind.num_tensors)
            ]
            single = [
                _call(kind.op, [item[i] for item in lists], kind.named, numbers[i : i + 1])
                for i in range(len(shapes))
            ]
            given = [[tensor.clone() for tensor in item] for item in lists]
            given_numbers: list[Any] = [numbers] if list_op.numbers else numbers[:1]
            if list_op.as_tensors:
                given_numbers = [NumberTensors(given_numbers[0], kind.dtype).made()]
            made = _call(list_op.op, given, list_op.named, given_numbers)
            return all(map(_same_bits, single, given[0] if in_place else made))
    except Exception:  # one of them does not take such arguments: they are not the same
        return False


def _call(op: Callable[..., Any], tensors: Sequence[Any], named: str, numbers: Sequence[Any]) -> Any:
    if named and numbers:
        return op(*tensors, **{named: numbers[0]})
    return op(*tensors, *numbers)


def _values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Special values, in another order for each seed, and others with all digits."""
    count, size = len(_SPECIAL), math.prod(shape)
    places = [(i * (2 * seed + 1) + i // count * seed + seed) % count for i in range(size)]
    mixed = [
        _SPECIAL[place] if i < 50 else ((i + seed) * 0.6180339887498949) % 4 - 2
        for i, place in enumerate(places)
    ]
    return torch.tensor(mixed, dtype=torch.float64).to(dtype).reshape(shape)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = _AS_BITS[one.dtype.itemsize]
    return torch.equal(one.view(bits), other.view(bits))
