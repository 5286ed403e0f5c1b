"""Operators of our own that a program may hold.

Formulas of torch's autograd that look at values on their way: between its arguments and its result each works on
tensors whose size depends on data; the result has a known size, so that a graph can hold it. They compute what torch's
own formulas compute in eager mode, in the same order. The recurrent layer of CPUs with what its backward needs,
whatever the grad mode around it. Products of matrices, convolutions with one filter for each channel, attention, and
cross-entropy, for which compiled backends write code (`native/`); attention gives what torch's op gives in one block,
and so does the loop of a recurrent layer; cross-entropy gives the losses of rows with the gradient of the logits. The
backward of a loss over classes with that of the softmax before it, by torch's kernels, some rows at a time. The
update of a parameter as a C++ function. oneDNN's product under a name that compilers do not know: they would fuse it in
ways that take constant weights. A copy that compilers do not take away. And a look at values that a kernel believes, for
programs from files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from monograph.layout import Layout
from monograph.native import KERNELS
from monograph.native.recurrent_formulas import recurrence, recurrence_backward
from monograph.native.update import UPDATES

_BLOCK: Final = 1 << 18  # bytes of the gradient of logarithms that are there at once
_LIBRARY: Final = torch.library.Library("monograph", "DEF")
_LIBRARY.define("masked_sum(Tensor x, Tensor mask) -> Tensor")
_LIBRARY.define("indexed_sum(Tensor x, int dim, Tensor index) -> Tensor")
_LIBRARY.define("taken(Tensor x, Tensor?[] indices, int[] size) -> Tensor")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str attr, Scalar?[] scalars, str? algorithm) -> Tensor"
)
_LIBRARY.define(
    "within(Tensor(a) x, Scalar low, Scalar high, bool ascending, int? besides, str about) -> Tensor(a)"
)
_LIBRARY.define("formed(Tensor(a) x, int[] size, ScalarType dtype) -> Tensor(a)")
_LIBRARY.define("apart(Tensor x, int number) -> Tensor")
_LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias=None) -> Tensor")
_LIBRARY.define("depthwise(Tensor x, Tensor weight, int[] stride, int[] padding) -> Tensor")
_LIBRARY.define(
    "depthwise_of_image(Tensor grad, Tensor weight, int[] size, int[] stride, int[] padding) -> Tensor"
)
_LIBRARY.define(
    "depthwise_of_weight(Tensor grad, Tensor x, int[] size, int[] stride, int[] padding) -> Tensor"
)
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, bool is_causal, float scale, int[] order) -> Tensor")
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logarithms, bool is_causal,"
    " float scale) -> Tensor"
)
_LIBRARY.define(
    "recurrence(Tensor given, Tensor weight, Tensor first, Tensor? other, str kind, bool reverse) -> Tensor"
)
_LIBRARY.define(
    "recurrence_backward(Tensor grad, Tensor last, Tensor? last_cells, Tensor weight, Tensor? first, Tensor block,"
    " str kind, bool reverse) -> Tensor"
)
_LIBRARY.define(
    "cross_entropy(Tensor logits, Tensor target, Tensor scale, int ignore_index) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "smooth_cross_entropy(Tensor logits, Tensor target, Tensor scale, Tensor uniform, int ignore_index)"
    " -> (Tensor, Tensor, Tensor)"
)
_CLASS_LOSS_BACKWARD: Final = "(Tensor grad, Tensor log_softmax, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight"
_LIBRARY.define(f"class_loss_backward{_CLASS_LOSS_BACKWARD}) -> Tensor")
_LIBRARY.define(f"class_loss_backward.out{_CLASS_LOSS_BACKWARD}, *, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.define("update(Tensor[] tensors, Tensor numbers, int[] written, str name) -> Tensor[]")
_LIBRARY.define(
    "recurrent_layer(Tensor x, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx, Tensor cx,"
    " bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional, bool batch_first,"
    " bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "recurrent_layer_backward(Tensor x, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx,"
    " Tensor cx, Tensor output, Tensor hy, Tensor cy, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy,"
    " bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, bool bidirectional,"
    " bool batch_first, Tensor workspace) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_select(mask).sum()


def _indexed_sum(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    positions: torch.Tensor = torch.ops.aten._unique(index, sorted=False)[0]
    return x.index_select(dim, positions).sum()


def _taken(x: torch.Tensor, indices: list[torch.Tensor | None], size: list[int]) -> torch.Tensor:
    taken: torch.Tensor = torch.ops.aten.index.Tensor(x, indices)
    return taken.sum_to_size(size) if taken.shape != torch.Size(size) else taken


def _within(
    x: torch.Tensor, low: float, high: float, ascending: bool, besides: int | None, about: str
) -> torch.Tensor:
    looked = x if besides is None or low <= besides <= high else x[x != besides]
    if looked.numel():
        least, most = (item.item() for item in torch.aminmax(looked))
        if not (low <= least and most <= high):  # nor if they are NaN
            raise IndexError(f"{about} has values from {least} to {most}; {low} to {high} fit")
        if ascending and (x[0] != low or bool((x.diff() < 0).any())):
            raise IndexError(f"{about} does not ascend from {low}")
    return _alias(x)


def _formed(x: torch.Tensor, size: list[int], dtype: torch.dtype) -> torch.Tensor:
    if x.shape != torch.Size(size) or x.dtype is not dtype:
        raise RuntimeError(
            f"an op gives {tuple(x.shape)} of {x.dtype}; the file says {tuple(size)} of {dtype}"
        )
    return _alias(x)


def _alias(x: torch.Tensor, *_settings: Any) -> torch.Tensor:
    shown: torch.Tensor = torch.ops.aten.alias.default(x)
    return shown


def _apart(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.clone()  # equal copies differ in their numbers, so that they are not taken for one


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _depthwise(x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int]) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.convolution.default(
        x, weight, None, stride, padding, [1, 1], False, [0, 0], weight.shape[0]
    )
    return made


def _depthwise_of_image(
    grad: torch.Tensor, weight: torch.Tensor, size: list[int], *sides: Any
) -> torch.Tensor:
    x = grad.new_empty(size).contiguous(memory_format=torch.channels_last)
    return _depthwise_backward(grad, x, weight, sides)[0]


def _depthwise_of_weight(grad: torch.Tensor, x: torch.Tensor, size: list[int], *sides: Any) -> torch.Tensor:
    return _depthwise_backward(grad, x, grad.new_empty(size), sides)[1]


def _depthwise_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, sides: Any
) -> tuple[torch.Tensor, ...]:
    made: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward.default(
        grad, x, weight, None, *sides, [1, 1], False, [0, 0], weight.shape[0], [True, True, False]
    )
    return made


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float, order: list[int]
) -> torch.Tensor:
    out, *logarithms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal, scale=scale
    )
    return torch.cat([out.permute(*order, 3).flatten(), *map(_by_positions, logarithms)])


def _attention_backward(grad: torch.Tensor, *args: Any) -> torch.Tensor:
    *given, is_causal, scale = args
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, *given, 0.0, is_causal, scale=scale
    )
    return torch.cat([*map(_by_positions, parts)])


def _by_positions(part: torch.Tensor) -> torch.Tensor:
    return part.transpose(1, 2).flatten()


def cross_entropy_of_torch(
    logits: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row by torch's kernels, and the gradient of the logits where that of each loss is `scale`."""
    softmax = torch.ops.aten._log_softmax.default(logits, 1, False)
    losses, weight = torch.ops.aten.nll_loss_forward.default(softmax, target, None, 0, ignore_index)
    grad = torch.ops.aten.nll_loss_backward.default(scale, softmax, target, None, 0, ignore_index, weight)
    return losses, torch.ops.aten._log_softmax_backward_data.default(grad, softmax, 1, logits.dtype)


def smooth_cross_entropy_of_torch(
    logits: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, uniform: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, ...]:
    """The same, with the sum of the logarithms of each row, where each of them has the gradient `uniform` besides."""
    softmax = torch.ops.aten._log_softmax.default(logits, 1, False)
    losses, weight = torch.ops.aten.nll_loss_forward.default(softmax, target, None, 0, ignore_index)
    grad = torch.ops.aten.nll_loss_backward.default(scale, softmax, target, None, 0, ignore_index, weight)
    both = uniform[:, None] + grad
    made = torch.ops.aten._log_softmax_backward_data.default(both, softmax, 1, logits.dtype)
    return losses, softmax.sum(1), made


def _class_loss_backward(grad: torch.Tensor, log_softmax: torch.Tensor, *args: Any) -> torch.Tensor:
    return _class_loss_backward_out(grad, log_softmax, *args, out=torch.empty_like(log_softmax))


def _class_loss_backward_out(
    grad: torch.Tensor, log_softmax: torch.Tensor, target: torch.Tensor, *args: Any, out: torch.Tensor
) -> torch.Tensor:
    aten = torch.ops.aten
    is_image = log_softmax.dim() > 2
    backward = aten.nll_loss2d_backward.default if is_image else aten.nll_loss_backward.default
    count = max(1, _BLOCK * len(log_softmax) // max(1, log_softmax.nbytes))
    for first in range(0, len(log_softmax), count):
        rows = slice(first, first + count)
        block, given = log_softmax[rows], grad[rows] if grad.dim() else grad
        made = backward(given, block, target[rows], *args)
        aten._log_softmax_backward_data.out(
            made, block, 1, block.dtype, out=out[rows]
        )  # may be the memory of `block`
    return out


def _update(
    tensors: list[torch.Tensor], numbers: torch.Tensor, _written: list[int], name: str
) -> list[torch.Tensor]:
    return UPDATES[name].computed(tensors, numbers)


def _linear(*args: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(*args)
    return result


# Both ops leave out torch's list of batch sizes, which is empty here: compiled steps cannot hold an empty list.
def _aten_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    results: tuple[torch.Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer.default(*args[:8], [], *args[8:])
    return results


def _recurrent_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():  # without it the kernel keeps nothing for its backward
        return _aten_layer(*(item.detach() if isinstance(item, torch.Tensor) else item for item in args))


def _recurrent_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    results: tuple[torch.Tensor, ...] = torch.ops.aten.mkldnn_rnn_layer_backward.default(
        *args[:20], [], *args[20:]
    )
    return results


def _fake(name: str) -> Callable[..., Any]:
    """What an op of `native/` gives, without numbers."""

    def described(*args: Any) -> Any:
        tensors = [item for item in args if isinstance(item, torch.Tensor)]
        options = [item for item in args if not (item is None or isinstance(item, torch.Tensor))]
        made = KERNELS[name](
            [Layout(tuple(item.shape), item.stride()) for item in tensors], options, 1
        ).results
        results = tuple(tensors[0].new_empty_strided(item.shape, item.stride) for item in made)
        return results if len(results) > 1 else results[0]

    return described


def _updated(
    tensors: list[torch.Tensor], _numbers: Any, written: list[int], _name: str
) -> list[torch.Tensor]:
    return [torch.empty_like(tensors[index]) for index in written]


def _one_number(x: torch.Tensor, *_args: Any) -> torch.Tensor:
    return x.new_empty(())


def _like_softmax(_grad: torch.Tensor, log_softmax: torch.Tensor, *_args: Any) -> torch.Tensor:
    return torch.empty_like(log_softmax)


def _sized(x: torch.Tensor, _indices: Any, size: list[int]) -> torch.Tensor:
    return x.new_empty(size)


_described: Callable[..., Any] | None
for _name, _kernel, _described in (
    ("masked_sum", _masked_sum, _one_number),
    ("indexed_sum", _indexed_sum, _one_number),
    ("taken", _taken, _sized),
    ("linear", _linear, _linear),
    ("within", _within, _alias),
    ("formed", _formed, _alias),
    ("apart", _apart, _apart),
    ("product", _product, None),
    ("depthwise", _depthwise, None),
    ("depthwise_of_image", _depthwise_of_image, None),
    ("depthwise_of_weight", _depthwise_of_weight, None),
    ("attention", _attention, None),
    ("attention_backward", _attention_backward, None),
    ("recurrence", recurrence, None),
    ("recurrence_backward", recurrence_backward, None),
    ("cross_entropy", cross_entropy_of_torch, None),
    ("smooth_cross_entropy", smooth_cross_entropy_of_torch, None),
    ("class_loss_backward", _class_loss_backward, _like_softmax),
    ("update", _update, _updated),
    ("recurrent_layer", _recurrent_layer, _aten_layer),
    ("recurrent_layer_backward", _recurrent_layer_backward, _recurrent_layer_backward),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _name = f"monograph::{_name}"
    torch.library.register_fake(_name, _described or _fake(_name), lib=_LIBRARY)
_LIBRARY.impl("class_loss_backward.out", _class_loss_backward_out, "CompositeExplicitAutograd")

MASKED_SUM: Final = torch.ops.monograph.masked_sum.default
INDEXED_SUM: Final = torch.ops.monograph.indexed_sum.default
TAKEN: Final = torch.ops.monograph.taken.default
WITHIN: Final = torch.ops.monograph.within.default
FORMED: Final = torch.ops.monograph.formed.default
APART: Final = torch.ops.monograph.apart.default
PRODUCT: Final = torch.ops.monograph.product.default
CLASS_LOSS_BACKWARD: Final = torch.ops.monograph.class_loss_backward.default
UPDATE: Final = torch.ops.monograph.update.default
DEPTHWISE: Final = torch.ops.monograph.depthwise.default
DEPTHWISE_OF_IMAGE: Final = torch.ops.monograph.depthwise_of_image.default
DEPTHWISE_OF_WEIGHT: Final = torch.ops.monograph.depthwise_of_weight.default
ATTENTION: Final = torch.ops.monograph.attention.default
ATTENTION_BACKWARD: Final = torch.ops.monograph.attention_backward.default
RECURRENCE: Final = torch.ops.monograph.recurrence.default
RECURRENCE_BACKWARD: Final = torch.ops.monograph.recurrence_backward.default
CROSS_ENTROPY: Final = torch.ops.monograph.cross_entropy.default
SMOOTH_CROSS_ENTROPY: Final = torch.ops.monograph.smooth_cross_entropy.default
NATIVE: Final = (
    PRODUCT,
    DEPTHWISE,
    DEPTHWISE_OF_IMAGE,
    DEPTHWISE_OF_WEIGHT,
    ATTENTION,
    ATTENTION_BACKWARD,
    RECURRENCE,
    RECURRENCE_BACKWARD,
    CROSS_ENTROPY,
    SMOOTH_CROSS_ENTROPY,
)
RECURRENT_LAYER: Final = torch.ops.monograph.recurrent_layer.default
RECURRENT_LAYER_BACKWARD: Final = torch.ops.monograph.recurrent_layer_backward.default
