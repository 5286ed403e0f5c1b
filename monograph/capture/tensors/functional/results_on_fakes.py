"""Fakes of what pure ops give: their form is asked of torch's kernels for fakes, for calls that are alike once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from monograph.compat.symbolic_numbers import is_symbolic
from monograph.ir.call.numbers import exactly
from monograph.layout import Layout, fills_a_block

_NUMBERS: dict[type, Any] = {int: 1, float: 1.0, bool: True}


class Examples:
    """What pure ops give, by op and by the forms of what they get."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._alike: dict[Any, bool] = {}  # if it has the form of the tensor that the op in place wrote to

    def of(self, op: Any, args: Any, kwargs: Any, like: Sequence[fx.Node]) -> Any:
        """An example of what an op gives; None if its kernel for fakes refuses."""
        given: list[Any] = []

        def example_of(node: fx.Node) -> Any:
            value = node.meta.get("val")
            given.append(value)
            return _NUMBERS.get(_kind(value), 1.0) if is_symbolic(value) else value

        values = fx.map_arg((args, kwargs), example_of)
        if len(like) == 1 and torch.Tag.pointwise in op.tags:
            return self._pointwise(op, values, given, like[0].meta["val"])
        return self._evaluated(op, values)

    def _pointwise(self, op: Any, values: Any, given: Sequence[Any], like: torch.Tensor) -> Any:
        """Arithmetic on blocks of one layout, and on numbers, gives that layout whatever the sizes."""
        tensors = [item for item in given if isinstance(item, torch.Tensor)]
        is_block = like.storage_offset() == 0 and fills_a_block(like.shape, like.stride())
        if not is_block or any(item.dim() and not _is_laid_out(item, like) for item in tensors):
            return self._evaluated(op, values)
        kinds = tuple((item.dtype, item.device, bool(item.dim())) for item in tensors)
        key = op, like.dim() > 0, kinds, tuple(map(type, (*values[0], *values[1].values())))
        if key not in self._alike:
            made = self._evaluated(op, values)
            self._alike[key] = made is not None and has_form(made, like)
        if not self._alike[key]:
            return self._evaluated(op, values)
        return like.detach() if like.requires_grad else like

    def _evaluated(self, op: Any, values: Any) -> Any:
        key = op, _forms(values)
        if key not in self._known:
            self._known[key] = evaluated(op, *values)
        return self._known[key]


def evaluated(op: Any, args: Any, kwargs: Any) -> Any:
    """What an op gives for fakes; None if its kernel refuses."""
    try:
        with torch.no_grad():
            return op(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # that it does will be seen where it is replayed


def complete(graph: fx.Graph) -> None:
    """Let each node whose value is read have an example of it, also those that no trace has made."""
    for node in graph.nodes:
        if node.op == "call_function" and node.users and "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: item.meta.get("val"))
            node.meta["val"] = evaluated(node.target, args, kwargs)


def has_form(value: Any, like: Any, *, of_part: bool = False) -> bool:
    """True for a tensor of the same form. What is written into a part may be laid out otherwise."""
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or value.storage_offset() != 0
    ):
        return False
    if value is like:
        return True
    same = value.dtype is like.dtype and value.device == like.device and value.shape == like.shape
    return same and (of_part or _is_laid_out(value, like))


def _is_laid_out(value: torch.Tensor, like: torch.Tensor) -> bool:
    return value is like or _layout(value).is_like(_layout(like))


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride())


def _kind(number: Any) -> type:
    return bool if isinstance(number, torch.SymBool) else int if isinstance(number, torch.SymInt) else float


def _forms(item: Any) -> Any:
    """What an op's result depends on in form, as a key."""
    match item:
        case torch.Tensor():
            return tuple(item.shape), item.stride(), item.dtype, item.device, item.layout
        case list() | tuple():
            return tuple(map(_forms, item))
        case dict():
            return tuple((key, _forms(value)) for key, value in item.items())
    return exactly(item)
