"""The captured step with every floating tensor in float64: the measure of everybody's rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from monograph.compat.distributed.ops import awaited, communicates
from monograph.compat.ops import is_random
from monograph.inspect.walk import Walk
from monograph.ir.meta import TensorMeta, value
from monograph.ir.program import Program
from monograph.state.random import RandomState

_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_KEEPS_BITS = (torch.ops.aten.view.dtype,)


class Float64Walk(Walk):
    """Random ops draw in their own type, since in another one the numbers would be others. So does an op that has no
    kernel for float64; those are listed in `narrow`.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Any], *, keep: bool = True, random: RandomState | None = None
    ) -> None:
        self.narrow: list[fx.Node] = []
        super().__init__(program, inputs, keep=keep, random=random)

    def taken(self, node: fx.Node, item: Any) -> Any:
        """Inputs in float64."""
        return _wide(super().taken(node, item))

    def computed(self, node: fx.Node) -> Any:
        """What an op gives in float64."""
        if node.target in _KEEPS_BITS or is_random(node.target):
            return self._in_own_type(node)
        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), self._wide_argument)
        try:
            return self._called(node, args, kwargs)
        except (RuntimeError, NotImplementedError):
            if communicates(node.target):
                raise  # other ranks take part in it once
            self.narrow.append(node)
            return self._in_own_type(node)

    def _wide_argument(self, item: Any) -> Any:
        if isinstance(item, fx.Node):
            return self.values[item]
        return torch.float64 if item in _NARROW else item

    def _in_own_type(self, node: fx.Node) -> Any:
        def narrowed(item: Any) -> Any:
            return _as_described(self.values[item], value(item)) if isinstance(item, fx.Node) else item

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), narrowed)
        return self._called(node, args, kwargs)

    @staticmethod
    def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
        made = awaited(node.target, node.target(*args, **kwargs))  # type: ignore[operator]
        return fx.node.map_aggregate(made, _wide)


def _as_described(item: Any, described: Any) -> Any:
    if isinstance(item, (tuple, list)) and isinstance(described, tuple):
        return [_as_described(entry, meta) for entry, meta in zip(item, described, strict=True)]
    if isinstance(item, torch.Tensor) and isinstance(described, TensorMeta):
        return item.to(described.dtype)
    return item


def _wide(item: Any) -> Any:
    narrow = isinstance(item, torch.Tensor) and item.dtype in _NARROW
    return item.double() if narrow else item
