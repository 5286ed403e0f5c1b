"""Matrix products, convolutions and attention by C++ code of our own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from monograph.native.attention import BY_POSITIONS

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
    options = [is_causal, scale, BY_POSITIONS]
    return _can_attend(Attention.of, [q, k, v], dropout, attn_mask, options)


def _is_attention_backward(*given: Any, attn_mask: Any = None, scale: Any = None) -> bool:
    *operands, dropout, is_causal = given
    return _can_attend(Attention.of_gradient, operands, dropout, attn_mask, [is_causal, scale])


def _can_attend(
    make: Callable[..., Attention], operands: list[Any], dropout: float, mask: Any, options: list[Any]
) -> bool:
    """True where there is neither a mask of numbers nor dropout, and code for the sizes."""
    if not all(map(_is_plain, operands)) or mask is not None or dropout or not all(operands[-1].shape):
        return False
    is_causal, scale, *order = options
    if not (scale is None or isinstance(scale, (int, float))):
        return False
    known = [is_causal, _scale(scale, operands[0]), *order]
    return make([item.layout for item in operands], known, 1).can_be_made


def _scale(scale: float | None, q: TensorMeta) -> float:
    """What scores are multiplied with: torch's choice if there is none."""
    return float(scale) if scale is not None else 1 / math.sqrt(max(q.shape[-1], 1))


def _attention(
    emit: Emit, q: Any, k: Any, v: Any, _: float = 0.0, is_causal: bool = False, **options: Any
) -> Any:
    described = as_described(q)
    order = _order_of(described)
    block = emit(ATTENTION, q, k, v, is_causal, _scale(options.get("scale"), described), order)
    shape = shape_of(q)
    return _parts(emit, block, (shape, order), (shape[:3], BY_POSITIONS))


def _order_of(q: TensorMeta) -> list[int]:
    """The order of images, heads and positions in memory, the outermost first, in which torch's kernel gives its result."""
    like = torch.empty_like(torch.empty_strided(q.shape, q.stride, device="meta")).stride()
    return sorted(range(3), key=lambda item: -like[item])


def _attention_backward(emit: Emit, *given: Any, **options: Any) -> Any:
    *operands, _, is_causal = given
    _, q, k, v, *_ = operands
    scale = _scale(options.get("scale"), as_described(q))
    block = emit(ATTENTION_BACKWARD, *operands, is_causal, scale)
    return _parts(emit, block, *((shape_of(item), BY_POSITIONS) for item in (q, k, v)))


def _parts(emit: Emit, block: Any, *parts: tuple[tuple[int, ...], Sequence[int]]) -> Any:
    """Tensors that follow each other in a block: shapes, and the order of images, heads and positions."""
    made, start = [], 0
    for shape, order in parts:
        end = start + math.prod(shape)
        part = emit(aten.slice.Tensor, block, 0, start, end)
        part = emit(aten.view.default, part, [*(shape[item] for item in order), *shape[3:]])
        back = [*(list(order).index(item) for item in range(3)), *range(3, len(shape))]
        made.append(emit(aten.permute.default, part, back))
        start = end
    return tuple(made)


OWN: Table = {
    aten.mm.default: (Candidate("own", _fits, _mm),),
    aten.addmm.default: (Candidate("own", _fits_sum, _addmm),),
    aten.convolution.default: (Candidate("own", _is_depthwise, _depthwise),),
    aten.convolution_backward.default: (Candidate("own", _is_depthwise_backward, _depthwise_backward),),
    FORWARD: (Candidate("own", _is_attention, _attention, takes_options=True),),
    BACKWARD: (Candidate("own", _is_attention_backward, _attention_backward, takes_options=True),),
}
