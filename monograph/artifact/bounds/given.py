"""What a rule gets of a call, what it asks of it, and what it gives: limits of values that are looked at before each call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from monograph.artifact.bounds.describe import described_result
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import check
from monograph.compat.ops import packet_name, schema_arguments
from monograph.ir.meta import TensorMeta
from monograph.ir.own_ops import FORMED, WITHIN

INDICES: Final = (torch.int64, torch.int32)
_SHOWING: Final = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, WITHIN, FORMED)


@dataclass(frozen=True)
class Limit:
    """The values of an argument are from `low` to `high`, both included; if they are `ascending`, the first is `low` and
    none is less than the one before. `besides` fits too.
    """

    argument: str
    low: float
    high: float
    ascending: bool = False
    besides: int | None = None


@dataclass(frozen=True)
class Given:
    """The arguments of a call by their names: constants and descriptions of tensors, and as they stand in the graph."""

    name: str
    values: Mapping[str, Any]
    nodes: Mapping[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.values[argument]

    def tensor(self, argument: str) -> TensorMeta:
        """The description of a tensor."""
        found = self.values[argument]
        if not isinstance(found, TensorMeta):
            raise Damaged(f"{self.name} has no tensor as its {argument}")
        return found

    def present(self, *arguments: str) -> list[str]:
        """Those of these arguments that the op has, and that are given."""
        return [name for name in arguments if self.values.get(name) is not None]

    def need(self, holds: bool, *arguments: str) -> None:
        """`Damaged` unless these arguments fit."""
        check(holds, f"{self.name} has arguments that do not fit: {', '.join(arguments)}")

    def need_form(self, shape: tuple[int, ...], dtype: torch.dtype, *arguments: str) -> None:
        """`Damaged` unless these arguments are tensors of this shape and type."""
        for name in arguments:
            self.need((self.tensor(name).shape, self.tensor(name).dtype) == (shape, dtype), name)

    def need_like(self, other: TensorMeta, *arguments: str) -> None:
        """`Damaged` unless these arguments are tensors of the shape and type of another one."""
        self.need_form(other.shape, other.dtype, *arguments)

    def need_floats(self, shape: tuple[int, ...], arguments: Iterable[str]) -> None:
        """`Damaged` unless these arguments are tensors of floats, of whatever type, and of this shape."""
        for name in arguments:
            item = self.tensor(name)
            self.need(item.shape == shape and item.dtype.is_floating_point, name)

    def need_made_by(self, argument: str, forward: str, position: int, same: Mapping[str, str]) -> None:
        """`Damaged` unless an argument is a result of the op `forward`, which had these arguments as well."""
        item = _shown(self.nodes[argument])
        fits = isinstance(item, fx.Node) and item.target is operator.getitem and item.args[1] == position
        maker = item.args[0] if fits else None
        if not isinstance(maker, fx.Node) or packet_name(maker.target) != forward:
            raise Damaged(f"{self.name} has a {argument} that {forward} has not made")
        given = all_arguments(maker.target, maker.args, maker.kwargs)
        for name, own in same.items():
            self.need(_same(given.get(name), self.nodes[own]), own)


Rule = Callable[[Given], Iterable[Limit] | None]


def all_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, with the defaults of those that are not given."""
    defaults = {item.name: item.default for item in schema_arguments(op)}
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


def gradient(forward: Any, *arguments: str) -> Rule:
    """Arguments of a gradient have the forms of what `forward` gives for the arguments of the same names, in its order."""
    names = [item.name for item in schema_arguments(forward)]

    def rule(given: Given) -> None:
        made = described_result(forward, **{name: given[name] for name in names})
        for argument, like in zip(arguments, made if isinstance(made, tuple) else (made,), strict=True):
            given.need_like(like, argument)
        given.need(given.values.get("reduction", 0) in (0, 1, 2), "reduction")

    return rule


def alike(*arguments: str) -> Rule:
    """These arguments are tensors of one shape and type."""

    def rule(given: Given) -> None:
        given.need(
            len({(given.tensor(name).shape, given.tensor(name).dtype) for name in arguments}) == 1, *arguments
        )

    return rule


def _shown(item: Any) -> Any:
    """The node whose memory a node shows."""
    while isinstance(item, fx.Node) and item.target in _SHOWING:
        item = item.args[0]
    return item


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return _shown(a) is _shown(b) or (type(a) is type(b) and not isinstance(a, fx.Node) and a == b)
