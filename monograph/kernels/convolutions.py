"""A 1x1 convolution of channels-last images as products of matrices, which have candidates of their own."""

from __future__ import annotations

from typing import Any

import torch

from monograph.ir.meta import TensorMeta
from monograph.kernels.candidates import Candidate, Emit, Table, products, shape_of, transposed
from monograph.layout import Layout

aten = torch.ops.aten
_IMAGES, _ONE, _NONE = 4, [1, 1], [0, 0]


def _forward(emit: Emit, x: Any, weight: Any, bias: Any, *_: Any) -> Any:
    made = emit(aten.mm.default, _pixels(emit, x), transposed(emit, _matrix(emit, weight)))
    if bias is not None:
        made = emit(aten.add.Tensor, made, bias)
    return _image(emit, made, x)


def _backward(emit: Emit, grad: Any, x: Any, weight: Any, *options: Any) -> Any:
    rows, filters = _pixels(emit, grad), _matrix(emit, weight)
    of_x, of_weight, of_bias = options[-1]
    dx = _image(emit, emit(aten.mm.default, rows, filters), x) if of_x else None
    dw = db = None
    if of_weight:
        made = emit(aten.mm.default, transposed(emit, rows), _pixels(emit, x))
        dw = emit(aten.view.default, made, list(shape_of(weight)))
    if of_bias:
        db = emit(aten.sum.dim_IntList, rows, [0])
    return dx, dw, db


def _pixels(emit: Emit, x: Any) -> Any:
    """A channels-last image as a matrix: a row for each pixel, a column for each channel."""
    n, c, h, w = shape_of(x)
    return emit(aten.view.default, emit(aten.permute.default, x, [0, 2, 3, 1]), [n * h * w, c])


def _image(emit: Emit, pixels: Any, like: Any) -> Any:
    n, _, h, w = shape_of(like)
    rows = emit(aten.view.default, pixels, [n, h, w, shape_of(pixels)[1]])
    return emit(aten.permute.default, rows, [0, 3, 1, 2])


def _matrix(emit: Emit, weight: Any) -> Any:
    return emit(aten.view.default, weight, list(shape_of(weight)[:2]))


def _is_product(x: Any, weight: Any, bias: Any, *options: Any) -> bool:
    stride, padding, _, is_transposed, _, groups = options[:6]
    return (
        are_images(x, weight)
        and products(x, weight, *([bias] if bias is not None else []))
        and (bias is None or bias.dtype is torch.float32)
        and weight.shape[2:] == (1, 1)
        and (stride, padding, is_transposed, groups) == (_ONE, _NONE, False, 1)
        and is_channels_last(x)
    )


def _is_product_backward(grad: Any, x: Any, weight: Any, _: Any, *options: Any) -> bool:
    return _is_product(x, weight, None, *options) and products(grad, x) and is_channels_last(grad)


def are_images(x: Any, weight: Any) -> bool:
    """True for the operands of a convolution of images."""
    return all(isinstance(item, TensorMeta) and len(item.shape) == _IMAGES for item in (x, weight))


def is_channels_last(x: TensorMeta) -> bool:
    """True if a row for each pixel is a view."""
    return Layout.channels_last(*x.shape).is_like(x.layout)


CONVOLUTIONS: Table = {
    aten.convolution.default: (Candidate("mm", _is_product, _forward),),
    aten.convolution_backward.default: (Candidate("mm", _is_product_backward, _backward),),
}
