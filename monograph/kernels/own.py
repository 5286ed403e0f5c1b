"""Matrix products and convolutions by C++ code of our own."""

from __future__ import annotations

from typing import Any

import torch

from monograph.ir.meta import TensorMeta
from monograph.ir.own_ops import DEPTHWISE, DEPTHWISE_OF_IMAGE, DEPTHWISE_OF_WEIGHT, PRODUCT
from monograph.kernels.candidates import Candidate, Emit, Table, shape_of
from monograph.kernels.convolutions import are_images, is_channels_last
from monograph.native import Depthwise, Product

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


OWN: Table = {
    aten.mm.default: (Candidate("own", _fits, _mm),),
    aten.addmm.default: (Candidate("own", _fits_sum, _addmm),),
    aten.convolution.default: (Candidate("own", _is_depthwise, _depthwise),),
    aten.convolution_backward.default: (Candidate("own", _is_depthwise_backward, _depthwise_backward),),
}
