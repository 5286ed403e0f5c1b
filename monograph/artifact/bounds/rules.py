"""Ops whose kernels believe what they are given: which forms fit, and which values are looked at before each call.

A rule gets a call's arguments by their names. It raises `Damaged` for what does not fit, and gives a `Limit` for each
tensor whose values have to be between two numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from monograph.artifact.bounds.describe import described_result
from monograph.checkpoint.bytes import contiguous_stride, fills_a_block
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import check
from monograph.compat.ops import packet_name, schema_arguments
from monograph.ir.meta import TensorMeta
from monograph.ir.own_ops import FORMED, WITHIN

aten = torch.ops.aten
_MAY_BE_EMPTY: Final = ("max_exp_avg_sqs", "momentum_buffer_list")
_BATCH_NORMS: Final = (
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_functional",
    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_with_update_functional",
    "aten::native_batch_norm_backward",
    "aten::batch_norm_backward",
)
_INDICES: Final = (torch.int64, torch.int32)
_FAR: Final = 1e30  # finite also as a number of pixels
_SHOWING: Final = (aten.detach.default, aten.alias.default, WITHIN, FORMED)


@dataclass(frozen=True)
class Limit:
    """The values of an argument are from `low` to `high`, both included; if they are `ascending`, the first is `low` and
    none is less than the one before. `besides` fits too.
    """

    argument: str
    low: float
    high: float
    ascending: bool = False
    besides: int | None = None


@dataclass(frozen=True)
class Given:
    """The arguments of a call by their names: constants and descriptions of tensors, and as they stand in the graph."""

    name: str
    values: Mapping[str, Any]
    nodes: Mapping[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.values[argument]

    def tensor(self, argument: str) -> TensorMeta:
        """The description of a tensor."""
        found = self.values[argument]
        if not isinstance(found, TensorMeta):
            raise Damaged(f"{self.name} has no tensor as its {argument}")
        return found

    def need(self, holds: bool, *arguments: str) -> None:
        """`Damaged` unless these arguments fit."""
        check(holds, f"{self.name} has arguments that do not fit: {', '.join(arguments)}")

    def made_by(self, argument: str, forward: str, position: int, same: Mapping[str, str]) -> None:
        """`Damaged` unless an argument is a result of the op `forward`, which had these arguments as well."""
        item = _shown(self.nodes[argument])
        fits = isinstance(item, fx.Node) and item.target is operator.getitem and item.args[1] == position
        maker = item.args[0] if fits else None
        if not isinstance(maker, fx.Node) or packet_name(maker.target) != forward:
            raise Damaged(f"{self.name} has a {argument} that {forward} has not made")
        arguments = schema_arguments(maker.target)
        given = {each.name: each.default for each in arguments}
        given |= dict(zip(given, maker.args, strict=False)) | dict(maker.kwargs)
        for name, own in same.items():
            self.need(_same(given.get(name), self.nodes[own]), own)


Rule = Callable[[Given], Iterator[Limit]]


def _shown(item: Any) -> Any:
    """The node whose memory a node shows."""
    while isinstance(item, fx.Node) and item.target in _SHOWING:
        item = item.args[0]
    return item


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return _shown(a) is _shown(b) or (type(a) is type(b) and not isinstance(a, fx.Node) and a == b)


# --- gradients that go by what the op itself gives -------------------------------------------------------------


def _gradient(forward: Any, *arguments: str) -> Rule:
    """Arguments of a gradient have the forms of what `forward` gives for the arguments of the same names, in its order."""
    names = [item.name for item in schema_arguments(forward)]

    def rule(given: Given) -> Iterator[Limit]:
        made = described_result(forward, **{name: given[name] for name in names})
        for argument, like in zip(arguments, made if isinstance(made, tuple) else (made,), strict=True):
            got = given.tensor(argument)
            given.need((got.shape, got.dtype) == (like.shape, like.dtype), argument)
        given.need(given.values.get("reduction", 0) in (0, 1, 2), "reduction")
        yield from ()

    return rule


def _pool_backward(forward: Any, dims: int) -> Rule:
    """The gradient of a pool goes where its indices say."""
    alike = _gradient(forward, "grad_output", "indices")

    def rule(given: Given) -> Iterator[Limit]:
        yield from alike(given)
        yield Limit("indices", 0, math.prod(given.tensor("self").shape[-dims:]) - 1)

    return rule


def _sampler(given: Given) -> Iterator[Limit]:
    """Where points outside of an image are moved to its border, kernels take one that is nowhere for a place in memory."""
    if given["padding_mode"] != 0:
        yield Limit("grid", -_FAR, _FAR)


def _sampler_backward(forward: Any) -> Rule:
    alike = _gradient(forward, "grad_output")

    def rule(given: Given) -> Iterator[Limit]:
        yield from alike(given)
        yield from _sampler(given)

    return rule


def _adaptive_pool_backward(dims: int) -> Rule:
    def rule(given: Given) -> Iterator[Limit]:
        x, grad, indices = map(given.tensor, ("self", "grad_output", "indices"))
        given.need(len(x.shape) == len(grad.shape) > dims, "grad_output")
        given.need(x.shape[:-dims] == grad.shape[:-dims] and x.dtype is grad.dtype, "grad_output")
        given.need(indices.shape == grad.shape and indices.dtype is torch.int64, "indices")
        yield Limit("indices", 0, math.prod(x.shape[-dims:]) - 1)

    return rule


def _fractional_pool_backward(dims: int) -> Rule:
    def rule(given: Given) -> Iterator[Limit]:
        given.need(len(given["kernel_size"]) == dims, "kernel_size")
        given.need(tuple(given["output_size"]) == given.tensor("grad_output").shape[-dims:], "output_size")
        yield from _adaptive_pool_backward(dims)(given)

    return rule


def _fractional_pool(given: Given) -> Iterator[Limit]:
    x, samples = given.tensor("self"), given.tensor("random_samples")
    dims = len(x.shape) - (2 if len(samples.shape) == 3 and x.shape[0] == samples.shape[0] else 1)
    given.need(len(given["kernel_size"]) == len(given["output_size"]) == samples.shape[-1], "output_size")
    given.need(dims >= 1 and samples.dtype is x.dtype and x.dtype.is_floating_point, "random_samples")
    yield Limit("random_samples", 0, 1)


def _average_pool_backward(dims: int) -> Rule:
    def rule(given: Given) -> Iterator[Limit]:
        x, grad = given.tensor("self"), given.tensor("grad_output")
        given.need(len(x.shape) == len(grad.shape) > dims, "grad_output")
        given.need(x.shape[:-dims] == grad.shape[:-dims] and x.dtype is grad.dtype, "grad_output")
        given.need(0 not in x.shape and 0 not in grad.shape, "self")
        yield from ()

    return rule


# --- embeddings --------------------------------------------------------------------------------------------------


def _embedding_dense_backward(given: Given) -> Iterator[Limit]:
    grad, indices = given.tensor("grad_output"), given.tensor("indices")
    given.need(indices.dtype in _INDICES, "indices")
    given.need(len(grad.shape) > 0 and grad.shape[:-1] == indices.shape, "grad_output")
    yield Limit("indices", 0, given["num_weights"] - 1)


def _embedding_bag(given: Given) -> Iterator[Limit]:
    weight, indices, _offsets = map(given.tensor, ("weight", "indices", "offsets"))
    given.need(len(weight.shape) == 2, "weight")
    _need_bags(given, indices)
    yield Limit("indices", 0, weight.shape[0] - 1)
    yield Limit("offsets", 0, indices.shape[0], ascending=True)


def _embedding_bag_backward(given: Given) -> Iterator[Limit]:
    """The gradients of a sum, a mean or a maximum over bags, from what the forward op noted of them."""
    grad, indices, of_bags = map(given.tensor, ("grad", "indices", "offset2bag"))
    given.need(len(grad.shape) == 2, "grad")
    rows = given["num_weights"] if "num_weights" in given.values else given.tensor("weight").shape[0]
    _need_bags(given, indices)
    bags, width = grad.shape
    if "weight" in given.values:
        weight = given.tensor("weight")
        given.need(
            len(weight.shape) == 2 and weight.shape[1] == width and weight.dtype is grad.dtype, "weight"
        )
    if "bag_size" in given.values:
        sizes, maximum = given.tensor("bag_size"), given.tensor("maximum_indices")
        given.need(sizes.dtype is indices.dtype and sizes.shape in ((bags,), (0,)), "bag_size")
        given.need(sizes.shape == (bags,) or given["mode"] == 0, "bag_size")
        fits = maximum.shape == (bags, width) if given["mode"] == 2 else True
        given.need(fits and maximum.dtype is indices.dtype, "maximum_indices")
        if given["mode"] == 2:
            yield Limit("maximum_indices", -1, rows - 1)
    yield Limit("indices", 0, rows - 1)
    given.need(of_bags.dtype is indices.dtype, "offset2bag")
    if "offsets" in given.values:
        given.need(given.tensor("offsets").shape == (bags,) or of_bags.shape == indices.shape, "offsets")
        yield Limit("offsets", 0, indices.shape[0], ascending=True)
    if "offsets" not in given.values or of_bags.shape != (0,):
        given.need(of_bags.shape == indices.shape, "offset2bag")
        yield Limit("offset2bag", 0, bags - 1)


def _need_bags(given: Given, indices: TensorMeta) -> None:
    given.need(len(indices.shape) == 1 and indices.dtype in _INDICES, "indices")
    given.need(not given.values.get("sparse"), "sparse")
    if "offsets" in given.values:
        offsets = given.tensor("offsets")
        given.need(len(offsets.shape) == 1 and offsets.dtype is indices.dtype, "offsets")
        given.need(offsets.shape[0] > 0, "offsets")  # words in no bag are counted all the same
    if given.values.get("per_sample_weights") is not None:
        given.need(given.tensor("per_sample_weights").shape == indices.shape, "per_sample_weights")


# --- lists of tensors ----------------------------------------------------------------------------------------------


def _lists_of_one_length(given: Given) -> Iterator[Limit]:
    lists = [item for item in given.values.values() if isinstance(item, (list, tuple))]
    given.need(len({len(item) for item in lists}) == 1, "lists")
    yield from ()


def _fused_update(given: Given) -> Iterator[Limit]:
    """Tensors of one parameter are read side by side, as they are in memory."""
    lists = {name: item for name, item in given.values.items() if isinstance(item, (list, tuple))}
    count = len(lists["self"])
    for name, items in lists.items():
        given.need(len(items) in ((0, count) if name in _MAY_BE_EMPTY else (count,)), name)
        for first, item in zip(lists["self"], items, strict=False):
            fits = isinstance(first, TensorMeta) and isinstance(item, TensorMeta)
            given.need(fits and first.dtype.is_floating_point, name)
            if name == "state_steps":
                given.need(item.shape == () and item.dtype is torch.float32, name)
            else:
                given.need((item.shape, item.dtype) == (first.shape, first.dtype), name)
                given.need(item.stride == contiguous_stride(item.shape) or item.stride == first.stride, name)
                given.need(math.prod(item.shape) == 0 or fills_a_block(item.shape, item.stride), name)
    needed = {"max_exp_avg_sqs": given.values.get("amsgrad")}
    needed["momentum_buffer_list"] = given.values.get("momentum", 0) != 0
    for name in lists:
        given.need(len(lists[name]) == count or not needed.get(name, True), name)
    for name in ("grad_scale", "found_inf", "lr"):
        item = given.values.get(name)
        given.need(not isinstance(item, TensorMeta) or math.prod(item.shape) == 1, name)
    yield from ()


# --- distances and Fourier transforms ------------------------------------------------------------------------------


def _cdist_backward(given: Given) -> Iterator[Limit]:
    made = described_result(aten._cdist_forward.default, *map(given.tensor, ("x1", "x2")), 2.0, None)
    for name in ("grad", "cdist"):
        given.need((given.tensor(name).shape, given.tensor(name).dtype) == (made.shape, made.dtype), name)
    given.need(given.tensor("x1").shape[:-2] == given.tensor("x2").shape[:-2], "x2")
    yield from ()


def _transform(given: Given) -> Iterator[Limit]:
    """A Fourier transform; a real one of a complex tensor needs half of the frequencies."""
    x, dims = given.tensor("self"), given["dim"]
    given.need(all(type(dim) is int and 0 <= dim < len(x.shape) for dim in dims), "dim")
    given.need(0 < len(dims) == len(set(dims)), "dim")
    size = given.values.get("last_dim_size")
    if size is not None:
        given.need(x.dtype.is_complex and size > 0 and x.shape[dims[-1]] == size // 2 + 1, "last_dim_size")
    yield from ()


def _pair_distances(given: Given) -> Iterator[Limit]:
    given.need(len(given.tensor("self").shape) == 2, "self")
    yield from ()


def _pair_distances_backward(given: Given) -> Iterator[Limit]:
    x = given.tensor("self")
    given.need(len(x.shape) == 2 and x.shape[0] > 1 and x.shape[1] > 0, "self")
    pairs = x.shape[0] * (x.shape[0] - 1) // 2
    for name in ("grad", "pdist"):
        given.need((given.tensor(name).shape, given.tensor(name).dtype) == ((pairs,), x.dtype), name)
    yield from ()


# --- losses and norms ----------------------------------------------------------------------------------------------


def _alike(*arguments: str) -> Rule:
    def rule(given: Given) -> Iterator[Limit]:
        forms = {(given.tensor(name).shape, given.tensor(name).dtype) for name in arguments}
        given.need(len(forms) == 1, *arguments)
        yield from ()

    return rule


def _batch_norm(given: Given) -> Iterator[Limit]:
    """A batch norm or its gradient: what there is for each channel is read as if it were contiguous."""
    x = given.tensor("input")
    given.need(len(x.shape) >= 2 and x.dtype.is_floating_point, "input")
    if "grad_out" in given.values:
        grad = given.tensor("grad_out")
        given.need((grad.shape, grad.dtype) == (x.shape, x.dtype), "grad_out")
    for name in ("weight", "bias", "running_mean", "running_var", "save_mean", "save_var", "save_invstd"):
        if given.values.get(name) is not None:
            item = given.tensor(name)
            given.need(item.shape in (x.shape[1:2], (0,)) and item.dtype.is_floating_point, name)
            given.need(item.stride == contiguous_stride(item.shape), name)
            given.need(
                item.shape != (0,) or (name.startswith("save") and not given.values.get("train", True)), name
            )
    yield from ()


def _layer_norm_backward(given: Given) -> Iterator[Limit]:
    x, form = given.tensor("input"), tuple(given["normalized_shape"])
    split = len(x.shape) - len(form)
    given.need(len(form) > 0 and split >= 0 and x.shape[split:] == form, "normalized_shape")
    given.need(
        (given.tensor("grad_out").shape, given.tensor("grad_out").dtype) == (x.shape, x.dtype), "grad_out"
    )
    for name in ("mean", "rstd"):
        item = given.values.get(name)
        if item is not None:
            fits = given.tensor(name).shape == (*x.shape[:split], *[1] * len(form))
            given.need(fits and given.tensor(name).dtype.is_floating_point, name)
    _need_scales(given, form, "weight", "bias")
    yield from ()


def _group_norm(given: Given) -> Iterator[Limit]:
    x, count, channels, groups = given.tensor("input"), given["N"], given["C"], given["group"]
    given.need(len(x.shape) >= 2 and x.dtype.is_floating_point and x.shape[:2] == (count, channels), "N", "C")
    given.need(given["HxW"] == math.prod(x.shape[2:]), "HxW")
    given.need(groups > 0 and channels > 0 and channels % groups == 0, "group")
    _need_scales(given, (channels,), "weight", "bias")
    if "grad_out" in given.values:
        grad = given.tensor("grad_out")
        given.need((grad.shape, grad.dtype) == (x.shape, x.dtype), "grad_out")
        for name in ("mean", "rstd"):
            item = given.tensor(name)
            given.need(item.shape == (count, groups) and item.dtype.is_floating_point, name)
    yield from ()


def _need_scales(given: Given, shape: tuple[int, ...], *names: str) -> None:
    for name in names:
        if given.values.get(name) is not None:
            item = given.tensor(name)
            given.need(item.shape == shape and item.dtype.is_floating_point, name)


def _dropout_backward(given: Given) -> Iterator[Limit]:
    grad, mask = given.tensor("grad_output"), given.tensor("mask")
    given.need(grad.shape == mask.shape and mask.dtype is torch.bool and grad.dtype.is_floating_point, "mask")
    yield from ()


def _nll_loss_backward(given: Given) -> Iterator[Limit]:
    x, target, total = map(given.tensor, ("self", "target", "total_weight"))
    given.need(len(x.shape) in (1, 2, 4), "self")
    classes = x.shape[0] if len(x.shape) == 1 else x.shape[1]
    given.need(target.shape == (x.shape[:1] + x.shape[2:] if len(x.shape) > 1 else ()), "target")
    _need_gradient_of_loss(given, x, target)
    given.need((math.prod(total.shape), total.dtype) == (1, x.dtype), "total_weight")
    given.need(target.dtype in (torch.int64, torch.uint8), "target")
    yield Limit("target", 0, classes - 1, besides=given["ignore_index"])


def _multi_margin_loss_backward(given: Given) -> Iterator[Limit]:
    x, target = given.tensor("self"), given.tensor("target")
    given.need(len(x.shape) == 2 and 0 not in x.shape and target.shape == x.shape[:1], "self")
    _need_gradient_of_loss(given, x, target)
    given.need(target.dtype is torch.int64, "target")
    yield Limit("target", 0, x.shape[1] - 1)


def _need_gradient_of_loss(given: Given, x: TensorMeta, target: TensorMeta) -> None:
    grad = given.tensor("grad_output")
    given.need(given["reduction"] in (0, 1, 2), "reduction")
    given.need(grad.shape == (target.shape if given["reduction"] == 0 else ()), "grad_output")
    given.need(grad.dtype is x.dtype, "grad_output")
    if given["weight"] is not None:
        weight, classes = given.tensor("weight"), x.shape[0] if len(x.shape) == 1 else x.shape[1]
        given.need((weight.shape, weight.dtype) == ((classes,), x.dtype), "weight")


def _weight_norm(direction: str, magnitude: str, *others: str) -> Rule:
    def rule(given: Given) -> Iterator[Limit]:
        v, dim = given.tensor(direction), given["dim"]
        given.need(0 not in v.shape and type(dim) is int and dim in (0, len(v.shape) - 1), "dim")
        each = tuple(size if place == dim else 1 for place, size in enumerate(v.shape))
        for name in (magnitude, *others):
            shape = v.shape if name == "grad_w" else each
            given.need((given.tensor(name).shape, given.tensor(name).dtype) == (shape, v.dtype), name)
        yield from ()

    return rule


# --- attention and linear algebra ------------------------------------------------------------------------------------


def _attention(given: Given) -> Iterator[Limit]:
    """Attention divides by its sizes and reads rows as in memory. Its gradient goes by what the op itself gives."""
    tensors = [given.tensor(name) for name in ("query", "key", "value")]
    query, key, values = tensors
    for name, item in zip(("query", "key", "value"), tensors, strict=True):
        given.need(len(item.shape) == 4 and 0 not in item.shape and item.dtype is query.dtype, name)
        given.need(item.stride[3] == 1 or item.shape[3] == 1, name)
    given.need(
        key.shape == values.shape and key.shape[3] == query.shape[3] and key.shape[:2] == query.shape[:2],
        "key",
    )
    if "grad_out" in given.values:
        made = described_result(aten._scaled_dot_product_flash_attention_for_cpu.default, *tensors)
        for name, like in (("grad_out", made[0]), ("out", made[0]), ("logsumexp", made[1])):
            got = given.tensor(name)
            given.need((got.shape, got.dtype) == (like.shape, like.dtype), name)
    if given["attn_mask"] is not None:
        mask = given.tensor("attn_mask").shape
        full = (*query.shape[:3], key.shape[2])
        given.need(
            len(mask) in (2, 4) and all(a in (1, b) for a, b in zip(mask[::-1], full[::-1], strict=False)),
            "attn_mask",
        )
    yield from ()


def _pivots(matrix: str, pivots: str) -> Rule:
    """Rows that were exchanged, counted from 1."""

    def rule(given: Given) -> Iterator[Limit]:
        lu, rows = given.tensor(matrix), given.tensor(pivots)
        given.need(len(lu.shape) >= 2, matrix)
        given.need(rows.shape == (*lu.shape[:-2], min(lu.shape[-2:])) and rows.dtype is torch.int32, pivots)
        yield Limit(pivots, 1, lu.shape[-2])

    return rule


# --- recurrent layers ----------------------------------------------------------------------------------------------

_GATES: Final = {2: 4, 3: 3}  # LSTM and GRU


def _recurrent_layer(given: Given) -> Iterator[Limit]:
    x = given.tensor("input")
    given.need(given["mode"] in _GATES and not given["batch_sizes"], "mode", "batch_sizes")
    given.need(len(x.shape) == 3 and 0 not in x.shape, "input")
    hidden, gates = given["hidden_size"], _GATES[given["mode"]] * given["hidden_size"]
    _steps, batch, size = x.shape
    forms: dict[str, tuple[int, ...]] = {"weight0": (gates, size), "weight1": (gates, hidden)}
    if given["has_biases"]:
        forms |= {"weight2": (gates,), "weight3": (gates,)}
    for name, shape in forms.items():
        given.need((given.tensor(name).shape, given.tensor(name).dtype) == (shape, x.dtype), name)
    for name in ("hx_", "cx_"):
        state = given.tensor(name)
        given.need(math.prod(state.shape) == batch * hidden and state.shape[-1:] == (hidden,), name)
        given.need(state.dtype is x.dtype, name)
    yield from ()


def _recurrent_layer_backward(given: Given) -> Iterator[Limit]:
    """The kernel goes by what the forward op left in `workspace`, of which nothing is known but who made it."""
    names = {"weight0": "weight1", "weight1": "weight2", "weight2": "weight3", "weight3": "weight4"}
    settings = ("reverse", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_sizes")
    same = {name: name for name in ("input", "hx_", *settings, "batch_first")} | names | {"cx_": "cx_tmp"}
    for position, argument in enumerate(("output", "hy_", "cy_", "workspace")):
        given.made_by(argument, "aten::mkldnn_rnn_layer", position, same)
    for gradient, of in (("grad_output", "output"), ("grad_hy", "hy_"), ("grad_cy", "cy_")):
        if given[gradient] is not None:
            got, like = given.tensor(gradient), given.tensor(of)
            given.need((got.shape, got.dtype) == (like.shape, like.dtype), gradient)
    yield from ()


RULES: Final[Mapping[str, Rule]] = {
    "aten::max_pool2d_with_indices_backward": _pool_backward(aten.max_pool2d_with_indices.default, 2),
    "aten::max_pool3d_with_indices_backward": _pool_backward(aten.max_pool3d_with_indices.default, 3),
    **{
        f"aten::{name}_backward": _gradient(getattr(aten, name).default, "grad_output")
        for name in (
            *(f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3)),
            *("avg_pool2d", "avg_pool3d", "grid_sampler_3d", "gelu"),
        )
    },
    "aten::grid_sampler_2d": _sampler,
    "aten::grid_sampler_2d_backward": _sampler_backward(aten.grid_sampler_2d.default),
    "aten::multilabel_margin_loss_backward": _gradient(
        aten.multilabel_margin_loss_forward.default, "grad_output", "is_target"
    ),
    "aten::adaptive_max_pool2d_backward": _adaptive_pool_backward(2),
    "aten::adaptive_max_pool3d_backward": _adaptive_pool_backward(3),
    "aten::fractional_max_pool2d_backward": _fractional_pool_backward(2),
    "aten::fractional_max_pool3d_backward": _fractional_pool_backward(3),
    "aten::_adaptive_avg_pool2d_backward": _average_pool_backward(2),
    "aten::_adaptive_avg_pool3d_backward": _average_pool_backward(3),
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::_embedding_bag_backward": _embedding_bag_backward,
    "aten::_embedding_bag_dense_backward": _embedding_bag_backward,
    "aten::_embedding_bag_per_sample_weights_backward": _embedding_bag_backward,
    "aten::_foreach_copy": _lists_of_one_length,
    "aten::_cdist_backward": _cdist_backward,
    **dict.fromkeys(("aten::_fft_c2r", "aten::_fft_r2c", "aten::_fft_c2c"), _transform),
    **{
        f"{space}{name}": _fused_update
        for space in ("aten::_", "monograph::")
        for name in ("fused_adam", "fused_adamw", "fused_sgd", "fused_adagrad")
    },
    "aten::fractional_max_pool2d": _fractional_pool,
    "aten::fractional_max_pool3d": _fractional_pool,
    "aten::embedding_dense_backward": _embedding_dense_backward,
    "aten::mkldnn_rnn_layer": _recurrent_layer,
    "aten::mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    "aten::_pdist_forward": _pair_distances,
    "aten::_pdist_backward": _pair_distances_backward,
    "aten::_softmax_backward_data": _alike("grad_output", "output"),
    "aten::_log_softmax_backward_data": _alike("grad_output", "output"),
    "aten::threshold_backward": _alike("grad_output", "self"),
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    "aten::native_dropout_backward": _dropout_backward,
    "aten::nll_loss_backward": _nll_loss_backward,
    "aten::nll_loss2d_backward": _nll_loss_backward,
    "aten::multi_margin_loss_backward": _multi_margin_loss_backward,
    "aten::_weight_norm_interface": _weight_norm("v", "g"),
    "aten::_weight_norm_interface_backward": _weight_norm("saved_v", "saved_g", "saved_norms", "grad_w"),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "aten::lu_unpack": _pivots("LU_data", "LU_pivots"),
    "aten::linalg_lu_solve": _pivots("LU", "pivots"),
}
