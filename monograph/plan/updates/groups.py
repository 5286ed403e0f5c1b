"""The calls of a tail: ops that are alike run together as one op on lists of tensors."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from torch import fx

from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import ScalarMeta, TensorMeta, form, value
from monograph.plan.updates.counterparts import Kind, ListOp, op_on_lists
from monograph.plan.updates.tail import Tail

CHUNK_BYTES: Final = (
    1 << 18
)  # of what the families of a chunk make: they should stay in a cache of the processor
_SMALL: Final = 256  # bfloat16 has the integers up to here


@dataclass(frozen=True)
class TailCall:
    """One op of a tail, or several by an op on lists."""

    ops: tuple[fx.Node, ...]
    list_op: ListOp | None = None

    @property
    def num_tensors(self) -> int:
        """How many lists of tensors the op on lists takes."""
        return sum(map(_is_tensor, self.ops[0].args))

    @cached_property
    def numbers(self) -> list[Any]:
        """The number that each op is given; none if they are given none."""
        found = map(_number_of, self.ops)
        return [number for number in found if number is not None]


def early_calls_of(tail: Tail) -> list[TailCall]:
    """The early ops that run together, each group in one call."""
    steps = _alike([(op,) for op in tail.early], {})
    return [call for call in steps if len(call.ops) > 1]


def family_bytes(family: Sequence[fx.Node]) -> int:
    """The bytes of the largest value that a family makes."""
    return max(map(_nbytes, family))


def _nbytes(op: fx.Node) -> int:
    return max((meta.extent for meta in leaves_in(value(op)) if isinstance(meta, TensorMeta)), default=0)


def chunk_calls(families: Sequence[tuple[fx.Node, ...]], tail: Tail) -> Iterator[TailCall]:
    """The calls of families that run at once."""
    if len(families) == 1:
        return (TailCall((op,)) for op in families[0])
    return _alike(families, tail.into)


def _alike(families: Sequence[tuple[fx.Node, ...]], in_place: Container[fx.Node]) -> Iterator[TailCall]:
    """The ops of families step by step, those together that one op on lists can do."""
    steps: dict[tuple[int, Any], list[fx.Node]] = {}
    for family in families:
        for step, op in enumerate(family):
            steps.setdefault((step, _alike_key(op, in_place)), []).append(op)
    for (_, key), ops in sorted(steps.items(), key=lambda item: item[0][0]):
        if isinstance(key, fx.Node) or len(ops) == 1:
            yield from (TailCall((op,)) for op in ops)
        elif not isinstance(key, tuple):  # functions of our own, which take several at once
            yield TailCall(tuple(ops))
        else:
            yield from _grouped(ops, *key)


def _alike_key(op: fx.Node, in_place: Container[fx.Node]) -> Any:
    """Ops of one key can run at once."""
    own = getattr(op.target, "kind", None)
    if own is not None:
        return own
    kind = _kind(op)
    return op if kind is None else (kind, op in in_place)


def _grouped(ops: Sequence[fx.Node], kind: Kind, in_place: bool) -> Iterator[TailCall]:
    """These ops, of which none needs another: in as few calls as there are ops on lists for them."""
    numbers = {_spelled(_number_of(op)) for op in ops}
    list_op = op_on_lists(kind, in_place=in_place, numbers=len(numbers) > 1)
    if list_op is not None:
        yield TailCall(tuple(ops), list_op)
        return
    alike: dict[Any, list[fx.Node]] = {}
    for op in ops:
        alike.setdefault(_spelled(_number_of(op)), []).append(op)
    for same in alike.values():
        list_op = op_on_lists(kind, in_place=in_place, numbers=False) if len(same) > 1 else None
        yield from [TailCall((op,)) for op in same] if list_op is None else [TailCall(tuple(same), list_op)]


def _spelled(number: Any) -> Any:
    return number if isinstance(number, fx.Node) else repr(number)


def _kind(op: fx.Node) -> Kind | None:
    """What counts of a call for an op on lists; None if there can be none."""
    made = value(op)
    tensors = [item for item in op.args if isinstance(item, fx.Node) and _is_tensor(item)]
    numbers = [(item, "") for item in op.args[len(tensors) :]]
    numbers += [(item, name) for name, item in op.kwargs.items()]
    if not isinstance(made, TensorMeta) or made.device.type != "cpu" or len(numbers) > 1:
        return None
    forms = [form(item) for item in tensors]
    if op.args[: len(tensors)] != tuple(tensors) or any(
        item is None or item.dtype != made.dtype for item in forms
    ):
        return None
    number, named = numbers[0] if numbers else (None, "")
    kind = _number_kind(number) if numbers else ""
    return None if kind is None else Kind(op.target, len(tensors), kind, named, made.dtype)


def _number_of(op: fx.Node) -> Any:
    """The number that an op in a group is given; None if it is given none."""
    for item in (*op.args, *op.kwargs.values()):
        if not _is_tensor(item):
            return item
    return None


def _is_tensor(item: Any) -> bool:
    return isinstance(item, fx.Node) and isinstance(value(item), TensorMeta)


def _number_kind(item: Any) -> str | None:
    described = value(item) if isinstance(item, fx.Node) else None
    if isinstance(described, ScalarMeta):
        return described.kind
    if type(item) is int and abs(item) <= _SMALL:
        return "small int"
    return type(item).__name__ if type(item) in (int, float, bool) else None
