"""Matrix products, convolutions and attention by C++ code of our own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from monograph.ir.meta import TensorMeta
from monograph.ir.own_ops import (
    ATTENTION,
    ATTENTION_BACKWARD,
    DEPTHWISE,
    DEPTHWISE_OF_IMAGE,
    DEPTHWISE_OF_WEIGHT,
    PRODUCT,
)
from monograph.kernels.attention import BACKWARD, FORWARD
from monograph.kernels.candidates import Candidate, Emit, Table, as_described, shape_of
from monograph.kernels.convolutions import are_images, is_channels_last
from monograph.native import Attention, Depthwise, Product

aten = torch.ops.aten
_PLAIN = ([1, 1], False, [0, 0])  # not dilated, not transposed


def _is_plain(item: Any) -> bool:
    return isinstance(item, TensorMeta) and item.dtype is torch.float32 and item.device.type == "cpu"


# --- products ---------------------------------------------------------------------------------------------------------


def _fits(a: Any, b: Any) -> bool:
    return _is_plain(a) and _is_plain(b) and Product(a.layout, b.layout).can_be_made


def _fits_sum(bias: Any, a: Any, b: Any) -> bool:
    return _fits(a, b) and _is_plain(bias) and bias.shape == b.shape[-1:] and bias.stride == (1,)


def _mm(emit: Emit, a: Any, b: Any) -> Any:
    return emit(PRODUCT, a, b)


def _addmm(emit: Emit, bias: Any, a: Any, b: Any) -> Any:
    return emit(PRODUCT, a, b, bias)


# --- convolutions with one filter for each channel --------------------------------------------------------------------


def _is_depthwise(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *options: Any) -> bool:
    return (
        are_images(x, weight)
        and _is_plain(x)
        and _is_plain(weight)
        and (bias is None or _is_plain(bias))
        and options[:3] == _PLAIN
        and options[3] == x.shape[1] == weight.shape[0]
        and weight.shape[1] == 1
        and _can_take(Depthwise.of([x.layout, weight.layout], [stride, padding], 1), x, weight)
    )


def _is_depthwise_backward(grad: Any, x: Any, weight: Any, _: Any, *options: Any) -> bool:
    return _is_depthwise(x, weight, None, *options) and _is_plain(grad) and is_channels_last(grad)


def _can_take(kernel: Depthwise, *operands: TensorMeta) -> bool:
    pairs = zip(kernel.operands, operands, strict=True)
    return kernel.can_be_made and all(wanted.is_like(given.layout) for wanted, given in pairs)


def _depthwise(emit: Emit, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *_: Any) -> Any:
    made = emit(DEPTHWISE, x, weight, stride, padding)
    if bias is None:
        return made
    return emit(aten.add.Tensor, made, emit(aten.view.default, bias, [1, shape_of(bias)[0], 1, 1]))


def _depthwise_backward(
    emit: Emit, grad: Any, x: Any, weight: Any, _: Any, stride: Any, padding: Any, *options: Any
) -> Any:
    of_x, of_weight, of_bias = options[-1]
    dx = emit(DEPTHWISE_OF_IMAGE, grad, weight, list(shape_of(x)), stride, padding) if of_x else None
    dw = emit(DEPTHWISE_OF_WEIGHT, grad, x, list(shape_of(weight)), stride, padding) if of_weight else None
    db = emit(aten.sum.dim_IntList, grad, [0, 2, 3]) if of_bias else None
    return dx, dw, db


# --- attention --------------------------------------------------------------------------------------------------------


def _is_attention(
    q: Any,
    k: Any,
    v: Any,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> bool:
    return _can_attend(Attention.of, [q, k, v], dropout, is_causal, attn_mask, scale)


def _is_attention_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    logarithms: Any,
    dropout: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> bool:
    operands = [grad, q, k, v, out, logarithms]
    return _can_attend(Attention.of_gradient, operands, dropout, is_causal, attn_mask, scale)


def _can_attend(
    make: Callable[..., Attention],
    operands: list[Any],
    dropout: float,
    is_causal: bool,
    mask: Any,
    scale: Any,
) -> bool:
    """True where there is neither a mask of numbers nor dropout, and code for the sizes."""
    if not all(map(_is_plain, operands)) or mask is not None or dropout or not all(operands[-1].shape):
        return False
    known = scale is None or isinstance(scale, (int, float))
    return (
        known
        and make([item.layout for item in operands], [is_causal, _scale(scale, operands[0])], 1).can_be_made
    )


def _scale(scale: float | None, q: TensorMeta) -> float:
    """What scores are multiplied with: torch's choice if there is none."""
    return float(scale) if scale is not None else 1 / math.sqrt(max(q.shape[-1], 1))


def _attention(
    emit: Emit, q: Any, k: Any, v: Any, _: float = 0.0, is_causal: bool = False, **options: Any
) -> Any:
    block = emit(ATTENTION, q, k, v, is_causal, _scale(options.get("scale"), as_described(q)))
    return _parts(emit, block, shape_of(q), shape_of(q)[:3])


def _attention_backward(
    emit: Emit,
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    logarithms: Any,
    _: float,
    *is_causal: bool,
    **options: Any,
) -> Any:
    scale = _scale(options.get("scale"), as_described(q))
    block = emit(ATTENTION_BACKWARD, grad, q, k, v, out, logarithms, *is_causal, scale)
    return _parts(emit, block, *map(shape_of, (q, k, v)))


def _parts(emit: Emit, block: Any, *shapes: tuple[int, ...]) -> Any:
    """Tensors that follow each other in a block, each by images, positions and heads."""
    parts, start = [], 0
    for images, heads, positions, *deep in shapes:
        end = start + math.prod((images, heads, positions, *deep))
        part = emit(aten.slice.Tensor, block, 0, start, end)
        part = emit(aten.view.default, part, [images, positions, heads, *deep])
        parts.append(emit(aten.transpose.int, part, 1, 2))
        start = end
    return tuple(parts)


OWN: Table = {
    aten.mm.default: (Candidate("own", _fits, _mm),),
    aten.addmm.default: (Candidate("own", _fits_sum, _addmm),),
    aten.convolution.default: (Candidate("own", _is_depthwise, _depthwise),),
    aten.convolution_backward.default: (Candidate("own", _is_depthwise_backward, _depthwise_backward),),
    FORWARD: (Candidate("own", _is_attention, _attention, takes_options=True),),
    BACKWARD: (Candidate("own", _is_attention_backward, _attention_backward, takes_options=True),),
}
