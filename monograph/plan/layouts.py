"""Which values have the strides that their descriptions say: shape functions of torch report others than its kernels give for some ops."""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch import fx

from monograph.compat.ops import OpOverload, is_custom, is_pointwise, schema_of
from monograph.ir.memory import is_view
from monograph.ir.meta import TensorMeta, form, metas, value
from monograph.ir.own_ops import CLASS_LOSS_BACKWARD
from monograph.layout import Layout, fills_a_block

_NEGATED: Final = torch.ops.aten._neg_view.default
# ops whose results are contiguous, whatever the strides of the arguments
_CONTIGUOUS: Final = """
    mm addmm bmm baddbmm mv dot sum mean amax amin embedding embedding_dense_backward native_layer_norm
    native_layer_norm_backward cat stack full zeros ones arange nll_loss_forward nll_loss_backward select_backward
    slice_backward max_pool2d_with_indices_backward
"""
_IN_ORDER: Final = frozenset(f"aten::{name}" for name in _CONTIGUOUS.split())


def certain_layouts(graph: fx.Graph) -> set[fx.Node]:
    """The values whose strides are those of their descriptions.

    But for what may be complex: inputs; what ops give whose results are contiguous in any case, or that are given contiguous tensors alone, or tensors of one
    layout; what element-wise ops give, whose shape function is the one that their kernels ask; views of such values.
    """
    sure: set[fx.Node] = set()
    for node in graph.nodes:
        if _may_have_a_bit(node):
            continue
        if node.op == "placeholder" or _lays_out_by_itself(node) or _follows(node, sure):
            sure.add(node)
    return sure


def _may_have_a_bit(node: fx.Node) -> bool:
    """True for what may be conjugated or negated by a bit, which an op that writes over it would not keep."""
    return node.target is _NEGATED or any(meta.dtype.is_complex for meta in metas(value(node)))


def _follows(node: fx.Node, sure: set[fx.Node]) -> bool:
    """True if what a node gives is certain, since what it is given is."""
    given = [item for item in node.all_input_nodes if any(metas(value(item)))]
    if not all(item in sure for item in given):
        return False
    if is_view(node) or node.target is operator.getitem:
        return True
    if node.target is CLASS_LOSS_BACKWARD:
        return True  # it is laid out as the logarithms
    if not isinstance(node.target, OpOverload) or is_custom(node.target):
        return node.op == "get_attr"
    return is_pointwise(node.target) or all(map(_is_contiguous, given)) or _are_alike(node, given)


def _are_alike(node: fx.Node, given: list[fx.Node]) -> bool:
    """True if all tensors that an op is given have the layout of its result, which has no gaps: any rule for it gives that."""
    described = form(node)
    if described is None or not fills_a_block(*_sizes(described)):
        return False
    return all(_sizes(meta) == _sizes(described) for item in given for meta in metas(value(item)))


def _sizes(described: TensorMeta) -> tuple[list[int], list[int]]:
    """Shape and strides at the sizes of the capture."""
    return [*map(int, described.shape)], [*map(int, described.stride)]


def _is_contiguous(node: fx.Node) -> bool:
    layouts = (Layout(*map(tuple, _sizes(item))) for item in metas(value(node)))
    return all(layout.is_like(Layout.contiguous(*layout.shape)) for layout in layouts)


def _lays_out_by_itself(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and str(schema_of(node.target).name) in _IN_ORDER
