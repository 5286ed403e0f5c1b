"""Operators of our own that a program may hold.

Formulas of torch's autograd that look at values on their way: between its arguments and its result each works on
tensors whose size depends on data; the result has a known size, so that a graph can hold it. They compute what torch's
own formulas compute in eager mode, in the same order. The recurrent layer of CPUs with what its backward needs,
whatever the grad mode around it. The product of two small matrices, for which compiled backends write code. And
oneDNN's product under a name that compilers do not know: they would fuse it in ways that take constant weights.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_LIBRARY: Final = torch.library.Library("monograph", "DEF")
_LIBRARY.define("masked_sum(Tensor x, Tensor mask) -> Tensor")
_LIBRARY.define("indexed_sum(Tensor x, int dim, Tensor index) -> Tensor")
_LIBRARY.define("taken(Tensor x, Tensor?[] indices, int[] size) -> Tensor")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str attr, Scalar?[] scalars, str? algorithm) -> Tensor"
)
_LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias=None) -> Tensor")
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


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


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


for _name, _kernel in (
    ("masked_sum", _masked_sum),
    ("indexed_sum", _indexed_sum),
    ("taken", _taken),
    ("linear", _linear),
    ("product", _product),
    ("recurrent_layer", _recurrent_layer),
    ("recurrent_layer_backward", _recurrent_layer_backward),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


def _as_large_as(a: torch.Tensor, b: torch.Tensor, _bias: Any = None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _one_number(x: torch.Tensor, *_args: Any) -> torch.Tensor:
    return x.new_empty(())


def _sized(x: torch.Tensor, _indices: Any, size: list[int]) -> torch.Tensor:
    return x.new_empty(size)


torch.library.register_fake("monograph::masked_sum", _one_number, lib=_LIBRARY)
torch.library.register_fake("monograph::indexed_sum", _one_number, lib=_LIBRARY)
torch.library.register_fake("monograph::taken", _sized, lib=_LIBRARY)
torch.library.register_fake("monograph::linear", _linear, lib=_LIBRARY)
torch.library.register_fake("monograph::product", _as_large_as, lib=_LIBRARY)
torch.library.register_fake("monograph::recurrent_layer", _aten_layer, lib=_LIBRARY)
torch.library.register_fake("monograph::recurrent_layer_backward", _recurrent_layer_backward, lib=_LIBRARY)

MASKED_SUM: Final = torch.ops.monograph.masked_sum.default
INDEXED_SUM: Final = torch.ops.monograph.indexed_sum.default
TAKEN: Final = torch.ops.monograph.taken.default
PRODUCT: Final = torch.ops.monograph.product.default
RECURRENT_LAYER: Final = torch.ops.monograph.recurrent_layer.default
RECURRENT_LAYER_BACKWARD: Final = torch.ops.monograph.recurrent_layer_backward.default
