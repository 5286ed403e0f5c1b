"""Other ways to compute a convolution of images: as matrix products over pixels, or tap by tap.

Kernels for convolutions prepare much per call. A 1x1 convolution whose operands lie channels-last is a product of two
matrices; one with a filter for each channel is a few multiplications that compilers fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product
from typing import Any

import torch

from monograph.backends.candidates import Candidate, Emit, Table, linear, products, shape_of, transposed
from monograph.ir.meta import TensorMeta

aten = torch.ops.aten
_IMAGES, _ONE, _NONE = 4, [1, 1], [0, 0]

# --- a 1x1 convolution as products ------------------------------------------------------------------------------------


def _mm(emit: Emit, a: Any, b: Any) -> Any:
    return emit(aten.mm.default, a, b)


def _mm_onednn(emit: Emit, a: Any, b: Any) -> Any:
    return linear(emit, a, transposed(emit, b))


def _forward(multiply: Callable[..., Any], emit: Emit, x: Any, weight: Any, bias: Any, *_: Any) -> Any:
    made = multiply(emit, _pixels(emit, x), transposed(emit, _matrix(emit, weight)))
    if bias is not None:
        made = emit(aten.add.Tensor, made, bias)
    return _image(emit, made, x)


def _backward(multiply: Callable[..., Any], emit: Emit, grad: Any, x: Any, weight: Any, *options: Any) -> Any:
    rows, filters = _pixels(emit, grad), _matrix(emit, weight)
    of_x, of_weight, of_bias = options[-1]
    dx = _image(emit, multiply(emit, rows, filters), x) if of_x else None
    dw = db = None
    if of_weight:
        made = multiply(emit, transposed(emit, rows), _pixels(emit, x))
        dw = emit(aten.view.default, made, list(shape_of(weight)))
    if of_bias:
        db = emit(aten.sum.dim_IntList, rows, [0])
    return dx, dw, db


def _pixels(emit: Emit, x: Any) -> Any:
    """An image that lies channels-last as a matrix: a row for each pixel, a column for each channel."""
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
        _are_images(x, weight)
        and products(x, weight, *([bias] if bias is not None else []))
        and (bias is None or bias.dtype is torch.float32)
        and weight.shape[2:] == (1, 1)
        and (stride, padding, is_transposed, groups) == (_ONE, _NONE, False, 1)
        and _is_channels_last(x)
    )


def _is_product_backward(grad: Any, x: Any, weight: Any, _: Any, *options: Any) -> bool:
    return _is_product(x, weight, None, *options) and products(grad, x) and _is_channels_last(grad)


# --- a filter for each channel, tap by tap ----------------------------------------------------------------------------


def _taps(emit: Emit, x: Any, weight: Any, _: Any, stride: Any, padding: Any, *__: Any) -> Any:
    out = [_out(*item) for item in zip(shape_of(x)[2:], shape_of(weight)[2:], stride, padding, strict=True)]
    window = _Window(emit, x, padding, out, stride)
    parts = [
        emit(aten.mul.Tensor, window.at(tap), _tap(emit, weight, tap))
        for tap in _all_taps(weight)
        if window.sees(tap)
    ]
    return reduce(partial(emit, aten.add.Tensor), parts)


def _taps_backward(
    emit: Emit, grad: Any, x: Any, weight: Any, _: Any, stride: Any, padding: Any, *options: Any
) -> Any:
    of_x, of_weight, of_bias = options[-1]
    channels, _one, *kernel = shape_of(weight)
    dx = dw = db = None
    if of_x:
        around = [size - 1 - pad for size, pad in zip(kernel, padding, strict=True)]
        window = _Window(emit, grad, around, list(shape_of(x)[2:]), _ONE)
        parts = []
        for tap in _all_taps(weight):
            mirrored = tuple(size - 1 - i for size, i in zip(kernel, tap, strict=True))
            if window.sees(mirrored):
                parts.append(emit(aten.mul.Tensor, window.at(mirrored), _tap(emit, weight, tap)))
        dx = reduce(partial(emit, aten.add.Tensor), parts)
    if of_weight:
        window = _Window(emit, x, padding, list(shape_of(grad)[2:]), stride)
        sums = []
        for tap in _all_taps(weight):
            if window.sees(tap):
                sums.append(
                    emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, grad, window.at(tap)), [0, 2, 3])
                )
            else:
                sums.append(emit(aten.full.default, [channels], 0.0, dtype=torch.float32, device="cpu"))
        dw = emit(aten.view.default, emit(aten.stack.default, sums, 1), list(shape_of(weight)))
    if of_bias:
        db = emit(aten.sum.dim_IntList, grad, [0, 2, 3])
    return dx, dw, db


class _Window:
    """What each tap of a filter sees of an image: a part of it, with zeros around where the part reaches beyond."""

    def __init__(
        self, emit: Emit, x: Any, padding: Sequence[int], out: Sequence[int], stride: Sequence[int]
    ) -> None:
        self.emit, self.x, self.padding, self.out, self.stride = emit, x, padding, out, stride
        self._padded: Any = None

    def sees(self, tap: Sequence[int]) -> bool:
        """False for taps that meet zeros only."""
        return all(
            any(0 <= position < size for position in self._positions(axis, tap))
            for axis, size in enumerate(shape_of(self.x)[2:])
        )

    def at(self, tap: Sequence[int]) -> Any:
        """The part that a tap is multiplied with, in the size of the result."""
        sizes = shape_of(self.x)[2:]
        inside = all(
            0 <= position < size for axis, size in enumerate(sizes) for position in self._positions(axis, tap)
        )
        part, shift = (self.x, self.padding) if inside else (self._with_zeros(), (0, 0))
        for axis in (0, 1):
            start = tap[axis] - shift[axis]
            end = start + (self.out[axis] - 1) * self.stride[axis] + 1
            if (start, end) != (0, shape_of(part)[axis + 2]) or self.stride[axis] != 1:
                part = self.emit(aten.slice.Tensor, part, axis + 2, start, end, self.stride[axis])
        return part

    def _positions(self, axis: int, tap: Sequence[int]) -> list[int]:
        return [o * self.stride[axis] + tap[axis] - self.padding[axis] for o in range(self.out[axis])]

    def _with_zeros(self) -> Any:
        if self._padded is None:
            high, wide = self.padding
            self._padded = self.emit(aten.constant_pad_nd.default, self.x, [wide, wide, high, high], 0.0)
        return self._padded


def _all_taps(weight: Any) -> list[tuple[int, ...]]:
    return list(product(*map(range, shape_of(weight)[2:])))


def _tap(emit: Emit, weight: Any, tap: Sequence[int]) -> Any:
    """One number for each channel, to be multiplied with images."""
    row = emit(aten.select.int, emit(aten.select.int, weight, 3, tap[1]), 2, tap[0])
    return emit(aten.view.default, row, [1, shape_of(weight)[0], 1, 1])


def _is_per_channel(x: Any, weight: Any, bias: Any, *options: Any) -> bool:
    stride, padding, dilation, is_transposed, _, groups = options[:6]
    return (
        _are_images(x, weight)
        and products(x, weight)
        and x.dtype is torch.float32
        and bias is None
        and weight.shape[:2] == (x.shape[1], 1)
        and groups == x.shape[1]
        and (dilation, is_transposed) == (_ONE, False)
        and all(pad < size <= 3 for pad, size in zip(padding, weight.shape[2:], strict=True))
        and all(_out(*item) > 0 for item in zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True))
    )


def _is_per_channel_backward(grad: Any, x: Any, weight: Any, _: Any, *options: Any) -> bool:
    strided = options[0] != _ONE
    return (
        _is_per_channel(x, weight, None, *options) and products(grad, x) and not (strided and options[-1][0])
    )


# --- both -------------------------------------------------------------------------------------------------------------


def _out(size: int, kernel: int, stride: int, padding: int) -> int:
    return int((size + 2 * padding - kernel) // stride + 1)


def _are_images(x: Any, weight: Any) -> bool:
    return all(isinstance(item, TensorMeta) and len(item.shape) == _IMAGES for item in (x, weight))


def _is_channels_last(x: TensorMeta) -> bool:
    """True if a row for each pixel is a view."""
    _, c, h, w = x.shape
    expected = (h * w * c, 1, w * c, c)
    return all(
        size == 1 or step == want for size, step, want in zip(x.shape, x.stride, expected, strict=True)
    )


CONVOLUTIONS: Table = {
    aten.convolution.default: (
        Candidate("mm", _is_product, partial(_forward, _mm)),
        Candidate("onednn_linear", _is_product, partial(_forward, _mm_onednn)),
        Candidate("taps", _is_per_channel, _taps),
    ),
    aten.convolution_backward.default: (
        Candidate("mm", _is_product_backward, partial(_backward, _mm)),
        Candidate("onednn_linear", _is_product_backward, partial(_backward, _mm_onednn)),
        Candidate("taps", _is_per_channel_backward, _taps_backward),
    ),
}
