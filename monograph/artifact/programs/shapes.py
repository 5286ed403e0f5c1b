"""Shapes of the results of common ops, by rules that need nothing but Python.

A file is not believed about shapes. Finding them with torch takes seconds of imports in a new process; for programs of
these ops alone it does not have to.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from monograph.checkpoint.leaves import check
from monograph.ir.meta import TensorMeta, value
from monograph.ir.program import Program

aten = torch.ops.aten
Form = tuple[tuple[int, ...], torch.dtype]
Rule = Callable[..., Any]


class UnknownError(Exception):
    """A rule does not say what an op gives for these arguments."""


def check_shapes(program: Program) -> bool:
    """`Damaged` if a value has not the shape that its description says; False if not all ops are known here."""
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    known = all(node.target in _RULES and not set(node.kwargs) - _KEYWORDS for node in nodes)
    if program.parts or not known:
        return False
    forms: dict[fx.Node, Any] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        described = value(node)
        if not isinstance(described, TensorMeta):
            return False
        forms[node] = (described.shape, described.dtype)
    for node in nodes:
        try:
            forms[node] = _RULES[node.target](*fx.node.map_arg(node.args, forms.__getitem__))
        except (UnknownError, ValueError, TypeError, LookupError, ArithmeticError):
            return False  # torch decides, and says what is wrong
        stated = _form_of(value(node))
        check(stated == forms[node], f"{node.name} is {forms[node]}, not {stated}")
    return True


def _form_of(described: Any) -> Any:
    if isinstance(described, tuple):
        return tuple(map(_form_of, described))
    return (described.shape, described.dtype) if isinstance(described, TensorMeta) else None


def _like(x: Form, *_settings: Any) -> Form:
    return x


def _together(x: Form, y: Any, *_settings: Any) -> Form:
    """Of two tensors of one dtype, each dimension the larger."""
    if not isinstance(y, tuple):
        if x[1].is_floating_point and type(y) in (int, float):
            return x
        raise UnknownError
    (left, dtype), (right, other) = x, y
    if dtype is not other:
        raise UnknownError
    width = max(len(left), len(right))
    pairs = zip((1,) * (width - len(left)) + left, (1,) * (width - len(right)) + right, strict=True)
    return tuple(_larger(a, b) for a, b in pairs), dtype


def _larger(a: int, b: int) -> int:
    if a != b and 1 not in (a, b):
        raise UnknownError
    return b if a == 1 else a


def _convolution(
    x: Form,
    weight: Form,
    bias: Form | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _extra: Sequence[int],
    groups: int,
) -> Form:
    (batch, channels, *sizes), (filters, inputs, *kernel) = x[0], weight[0]
    if transposed or channels != inputs * groups or filters % groups or len(sizes) != len(kernel):
        raise UnknownError
    made = [
        (size + 2 * pad - spread * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, spread in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]
    if min(made) < 1 or min(stride) < 1 or x[1] is not weight[1] or (bias and bias[0] != (filters,)):
        raise UnknownError
    return (batch, filters, *made), x[1]


def _batch_norm(x: Form, *statistics: Any) -> tuple[Form, Form, Form]:
    if any(isinstance(item, tuple) and item != ((x[0][1],), x[1]) for item in statistics):
        raise UnknownError
    return x, ((0,), x[1]), ((0,), x[1])


def _mean(x: Form, dims: Sequence[int] | None, keep: bool = False) -> Form:
    rank = len(x[0])
    gone = {dim % rank for dim in (dims or range(rank))}
    if not x[1].is_floating_point or not all(-rank <= dim < rank for dim in dims or ()):
        raise UnknownError
    shape = [1 if dim in gone else size for dim, size in enumerate(x[0]) if keep or dim not in gone]
    return tuple(shape), x[1]


def _transposed(x: Form) -> Form:
    if len(x[0]) > 2:
        raise UnknownError
    return x[0][::-1], x[1]


def _product(a: Form, b: Form) -> Form:
    (rows, inner), (other, columns) = a[0], b[0]
    if inner != other or a[1] is not b[1]:
        raise UnknownError
    return (rows, columns), a[1]


def _product_and_sum(bias: Form, a: Form, b: Form) -> Form:
    made = _product(a, b)
    if _together(bias, made) != made:
        raise UnknownError
    return made


def _view(x: Form, shape: Sequence[int]) -> Form:
    if min(shape, default=0) < 0 or math.prod(shape) != math.prod(x[0]):
        raise UnknownError
    return tuple(shape), x[1]


_SAME: Final = (
    aten.relu.default,
    aten.hardtanh.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.gelu.default,
    aten.tanh.default,
    aten.exp.default,
    aten.neg.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
)
_RULES: Final[Mapping[Any, Rule]] = {
    **dict.fromkeys(_SAME, _like),
    aten.add.Tensor: _together,
    aten.sub.Tensor: _together,
    aten.mul.Tensor: _together,
    aten.convolution.default: _convolution,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.mean.dim: _mean,
    aten.t.default: _transposed,
    aten.mm.default: _product,
    aten.addmm.default: _product_and_sum,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    operator.getitem: lambda items, index: items[index],
}
_KEYWORDS: Final = frozenset({"memory_format", "approximate"})
