"""Ops on half types that the compiler takes apart are computed in float32, and rounded once, as eager's kernels do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from monograph.ir.meta import form
from monograph.ir.program import Program
from monograph.passes.inductor.rewrite import calls_like, put_in_place, rewritten

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)

# By op the types in which it is widened.
_WIDENED: Mapping[Any, tuple[torch.dtype, ...]] = {
    # each part would round: these torch takes apart in the type of their arguments, others in float32
    aten.silu_backward.default: _HALF,
    aten.mish_backward.default: _HALF,
    aten.lerp.Scalar: _HALF,
    aten.lerp.Tensor: _HALF,
    aten.glu.default: _HALF,
    # the threshold would round
    aten.threshold_backward.default: _HALF,
    # left to eager's kernel, to which the compiler does not give the numbers in the right way
    aten.index_add.default: (torch.bfloat16,),
}
# Beside a half type, numbers are of that type, but where eager's kernels take the second factor as it is; and the product
# with `alpha` is not rounded.
_WITH_NUMBERS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_WITH_ALPHA = (aten.add.Tensor, aten.sub.Tensor)
# Torch computes these in float32, but they are taken apart here if the number is known only later.
_WITH_VALUE = (aten.addcmul.default, aten.addcdiv.default)


def wide_halves(program: Program) -> Program:
    """Put casts to float32 before such ops, and back after them."""
    return rewritten(program, _is_half, _widen)


def _is_half(node: fx.Node) -> bool:
    made = form(node)
    if made is None or made.dtype not in _HALF:
        return False
    if node.target in _WITH_NUMBERS:
        return _is_number(node.args[1], made.dtype)
    if node.target in _WITH_VALUE:
        return isinstance(node.kwargs.get("value"), fx.Node)
    if node.target in _WITH_ALPHA:
        return bool(node.kwargs.get("alpha", 1) != 1)
    return made.dtype in _WIDENED.get(node.target, ())


def _is_number(item: object, dtype: torch.dtype) -> bool:
    """True for a number, or a single element of another type, which eager's kernels take for a number."""
    given = form(item) if isinstance(item, fx.Node) else None
    return given is None or (not given.shape and given.dtype != dtype)


def _widen(node: fx.Node) -> None:
    graph, made, call = node.graph, form(node), calls_like(node)
    assert made is not None
    dtype = made.dtype

    def cast(item: fx.Node, dtype: torch.dtype) -> fx.Node:
        return call(aten._to_copy.default, item, dtype=dtype)

    def wide(item: fx.Node) -> fx.Node:
        given = form(item)
        return item if given is None or given.dtype not in _HALF else cast(item, torch.float32)

    def rounded(item: Any) -> Any:
        """What eager's kernel takes in the half type, in float32."""
        if not isinstance(item, fx.Node):
            return torch.tensor(item, dtype=dtype).item()
        given = form(item)
        if given is None:
            item = call(aten.scalar_tensor.default, item, dtype=dtype)
        elif given.dtype != dtype:
            item = cast(item, dtype)
        return cast(item, torch.float32)

    with graph.inserting_before(node):
        if node.target in _WITH_ALPHA:
            first, second = map(rounded, node.args[:2])
            op = call(node.target, first, call(aten.mul.Tensor, second, rounded(node.kwargs["alpha"])))
        else:
            op = call(node.target, *fx.map_arg(node.args, wide), **node.kwargs)
        result = cast(op, dtype)
        put_in_place(result, node)
    graph.erase_node(node)
