"""Before the first micro-batch, buffers take the values that they have in the first process of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.ir.evaluate import fill_meta
from monograph.ir.meta import TensorMeta, form, set_origin
from monograph.layout import contiguous_stride
from monograph.user_code.lines import Origin

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class TakenOver:
    """The paths of buffers of a module, and the group of the processes that have copies of it."""

    module: str
    group: str
    paths: tuple[str, ...]


def take_over(graph: fx.Graph, taken: TakenOver, inputs: Mapping[str, fx.Node]) -> dict[str, fx.Node]:
    """Write it at the end of a graph: the values by their paths, one collective for those of one type."""
    kinds: dict[Any, list[tuple[str, fx.Node, TensorMeta]]] = {}
    for path in taken.paths:
        described = form(inputs[path])
        if described is not None and 0 not in described.shape:
            kinds.setdefault((described.dtype, described.device), []).append((path, inputs[path], described))

    def op(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        set_origin(node, Origin(module=taken.module, phase="forward"))
        return node

    found: dict[str, fx.Node] = {}
    for (dtype, _), alike in kinds.items():
        flat = op(_aten.cat.default, [_flat(op, node, described) for _, node, described in alike])
        first = op(_c10d.wait_tensor.default, op(_c10d.broadcast.default, flat, 0, taken.group))
        begin = 0
        for path, _, described in alike:
            end = begin + _count(described.shape) * (2 if dtype.is_complex else 1)
            found[path] = _back(op, op(_aten.slice.Tensor, first, 0, begin, end), described)
            begin = end
    fill_meta(graph)
    return found


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(map(int, shape)).numel())


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
