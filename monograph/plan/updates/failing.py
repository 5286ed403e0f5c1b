"""Which ops may refuse the values that they are given: what is written before such an op runs may have to be undone."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates
from monograph.compat.inductor.checks.any_values import SPACES_OF_ANY_VALUES, TAKE_ANY_VALUES
from monograph.compat.ops import OpOverload, is_custom, is_pointwise, overload_name, schema_of
from monograph.ir.memory import is_view
from monograph.ir.meta import ScalarMeta, TensorMeta, form, metas, origin, value
from monograph.ir.own_ops import CLASS_LOSS_BACKWARD
from monograph.plan.layouts import certain_layouts

aten = torch.ops.aten
# Backwards that look at indices which an op before them has looked at: that op, one of these, and where each has the indices and the
# tensor, or the number, that they index into. A result of the op has the indices where it finds them itself.
_CHECKED_BY: Final[Mapping[Any, tuple[tuple[Any, ...], int, int | None]]] = {
    aten.embedding_dense_backward.default: ((aten.embedding.default,), 1, 1),
    aten.nll_loss_backward.default: ((aten.nll_loss_forward.default,), 2, 1),
    aten.nll_loss2d_backward.default: ((aten.nll_loss2d_forward.default,), 2, 1),
    CLASS_LOSS_BACKWARD: ((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), 2, 1),
    aten.index_put.default: ((aten.index.Tensor,), 1, 1),
    aten.max_pool2d_with_indices_backward.default: ((aten.max_pool2d_with_indices.default,), 7, None),
    aten.max_pool3d_with_indices_backward.default: ((aten.max_pool3d_with_indices.default,), 7, None),
}


def can_fail(node: fx.Node) -> bool:
    """True for an op that may refuse values, or of which nobody knows. Numbers that it is given have to fit into its type.

    A collective refuses none: if another process is gone, no state of this one is of use any more.
    """
    if communicates(node.target):
        return False
    if node.target is operator.getitem or is_view(node) or origin(node).again:
        return False  # what has run once takes the same values again
    if not isinstance(node.target, OpOverload) or is_custom(node.target):
        return True
    described = form(node)
    if _takes_any(node.target):
        largest = math.inf if described is None else largest_of(described.dtype)
        return not all(_fits(item, largest) for item in (*node.args, *node.kwargs.values()))
    if node.target in _CHECKED_BY:
        return not _was_checked(node)
    return described is None or not is_arithmetic(node, described)


def views_hold(graph: fx.Graph, ops: Iterable[fx.Node]) -> bool:
    """True if no view among these ops can fail, since the strides of what it shows are certain."""
    sure = certain_layouts(graph)
    return all(node.all_input_nodes[0] in sure for node in ops if node.target is aten.view.default)


def is_arithmetic(node: fx.Node, described: TensorMeta) -> bool:
    """True for element-wise ops on floats: they cannot fail once their numbers fit into their type."""
    if not is_pointwise(node.target):
        return False
    largest = largest_of(described.dtype)
    return all(_is_taken(item, largest) for item in (*node.args, *node.kwargs.values()))


@cache
def largest_of(dtype: torch.dtype) -> float:
    """The largest number of a type; infinite for types that numbers are only compared in."""
    return torch.finfo(dtype).max if dtype.is_floating_point else math.inf


def numbers_of(node: fx.Node) -> list[fx.Node]:
    """The numbers of Python that an op is given."""
    return [item for item in node.all_input_nodes if isinstance(value(item), ScalarMeta)]


@cache
def _takes_any(op: Any) -> bool:
    name = str(schema_of(op).name)
    return (
        not TAKE_ANY_VALUES.isdisjoint((name, f"{name}.{overload_name(op)}"))
        or op.namespace in SPACES_OF_ANY_VALUES
    )


def _is_taken(item: Any, largest: float) -> bool:
    if isinstance(item, fx.Node):
        described = value(item)
        if isinstance(described, TensorMeta):
            return described.dtype.is_floating_point or described.dtype is torch.bool
        return isinstance(described, ScalarMeta)
    return _fits(item, largest) and (item is None or isinstance(item, (int, float, str, torch.dtype)))


def _fits(item: Any, largest: float) -> bool:
    """False for a number that a type does not have."""
    return not isinstance(item, (int, float)) or not math.isfinite(item) or abs(item) <= largest


def _was_checked(node: fx.Node) -> bool:
    """True if an op has looked at the very indices of this one before, for the same size."""
    ops, place, theirs = _CHECKED_BY[node.target]
    indices: Any = node.args[place]
    one = (
        indices
        if isinstance(indices, fx.Node)
        else next((item for item in indices if item is not None), None)
    )
    if one is None:
        return False
    if theirs is None:
        source = one.args[0] if one.target is operator.getitem else None
        if not isinstance(source, fx.Node) or source.target not in ops:
            return False
        return form(source.args[0]) == form(node.args[1])  # type: ignore[arg-type]
    readers = [item for item in one.users if item.target in ops and item.args[theirs] == indices]
    return any(_size_indexed(item) == _size_indexed(node) for item in readers)


def _size_indexed(node: fx.Node) -> Any:
    """What indices point into: the rows of a table, or the classes of a loss."""
    if node.target is aten.embedding_dense_backward.default:
        return node.args[2]
    tensor = node.args[1] if "backward" in str(node.target) else node.args[0]
    described = next(metas(value(tensor)), None) if isinstance(tensor, fx.Node) else None
    if described is None:
        return object()  # equal to nothing
    return described.shape[0] if node.target is aten.embedding.default else described.shape
