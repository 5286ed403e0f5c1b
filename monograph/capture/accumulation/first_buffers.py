"""Before the first micro-batch, buffers take the values that they have in the first process of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.distributed.buffers import of_the_first
from monograph.ir.evaluate import fill_meta
from monograph.ir.meta import TensorMeta, form, set_origin
from monograph.layout import contiguous_stride
from monograph.user_code.lines import Origin

_aten = torch.ops.aten


@dataclass(frozen=True)
class TakenOver:
    """The paths of buffers of a module, and the group of the processes that have copies of it."""

    module: str
    group: str
    paths: tuple[str, ...]


def take_over(graph: fx.Graph, taken: TakenOver, inputs: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
    """Write it at the end of a graph: the values by their paths, one collective for those of one device."""
    kinds: dict[torch.device, list[tuple[str, TensorMeta]]] = {}
    for path in taken.paths:
        described = form(inputs[path])
        if described is not None and 0 not in described.shape:
            kinds.setdefault(described.device, []).append((path, described))

    def op(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        set_origin(node, Origin(module=taken.module, phase="forward"))
        return node

    found: dict[str, fx.Node] = {}
    for alike in kinds.values():
        rows = [
            (_flat(op, inputs[path], described), _plain(described.dtype), _count(described))
            for path, described in alike
        ]
        for (path, described), first in zip(alike, of_the_first(rows, taken.group, op), strict=True):
            found[path] = _back(op, first, described)
    fill_meta(graph)
    return found


def _plain(dtype: torch.dtype) -> torch.dtype:
    """The type of the numbers as which they are sent."""
    return torch.uint8 if dtype is torch.bool else dtype.to_real()


def _count(described: TensorMeta) -> int:
    """How many numbers are sent of it."""
    return math.prod(map(int, described.shape)) * (2 if described.dtype.is_complex else 1)


def _flat(op: Callable[..., fx.Node], node: fx.Node, described: TensorMeta) -> fx.Node:
    """A buffer as one row of numbers that every library of collectives knows."""
    if described.stride != contiguous_stride(described.shape):
        node = op(_aten.clone.default, node)
        node.kwargs = {"memory_format": torch.contiguous_format}
    if described.dtype.is_complex:
        node = op(_aten.view_as_real.default, node)
    elif described.dtype is torch.bool:
        node = op(_aten.view.dtype, node, torch.uint8)
    return op(_aten.view.default, node, [-1])


def _back(op: Callable[..., fx.Node], piece: fx.Node, described: TensorMeta) -> fx.Node:
    if described.dtype.is_complex:
        return op(_aten.view_as_complex.default, op(_aten.view.default, piece, [*described.shape, 2]))
    node = op(_aten.view.default, piece, [*described.shape])
    return op(_aten.view.dtype, node, torch.bool) if described.dtype is torch.bool else node
