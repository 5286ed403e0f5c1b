"""Rules for ops that go where an index says: gradients of pools, samplers of images, embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from monograph.artifact.bounds.given import INDICES, Given, Limit, Rule, gradient
from monograph.ir.meta import TensorMeta

aten = torch.ops.aten
_FAR: Final = 1e30  # finite also as a number of pixels


def _pool_backward(forward: Any, dims: int) -> Rule:
    """The gradient of a pool goes where its indices say."""
    forms = gradient(forward, "grad_output", "indices")

    def rule(given: Given) -> Iterator[Limit]:
        forms(given)
        yield Limit("indices", 0, math.prod(given.tensor("self").shape[-dims:]) - 1)

    return rule


def _need_pooled(given: Given, dims: int) -> tuple[TensorMeta, TensorMeta]:
    """What was pooled, and the gradient of what that gave: images alike but for their sizes."""
    x, grad = given.tensor("self"), given.tensor("grad_output")
    given.need(len(x.shape) == len(grad.shape) > dims, "grad_output")
    given.need(x.shape[:-dims] == grad.shape[:-dims] and x.dtype is grad.dtype, "grad_output")
    return x, grad


def _average_pool_backward(dims: int) -> Rule:
    def rule(given: Given) -> None:
        x, grad = _need_pooled(given, dims)
        given.need(0 not in x.shape and 0 not in grad.shape, "self")

    return rule


def _adaptive_pool_backward(dims: int) -> Rule:
    def rule(given: Given) -> Iterator[Limit]:
        x, grad = _need_pooled(given, dims)
        given.need_form(grad.shape, torch.int64, "indices")
        yield Limit("indices", 0, math.prod(x.shape[-dims:]) - 1)

    return rule


def _fractional_pool_backward(dims: int) -> Rule:
    pooled = _adaptive_pool_backward(dims)

    def rule(given: Given) -> Any:
        given.need(len(given["kernel_size"]) == dims, "kernel_size")
        given.need(tuple(given["output_size"]) == given.tensor("grad_output").shape[-dims:], "output_size")
        return pooled(given)

    return rule


def _fractional_pool(given: Given) -> Iterator[Limit]:
    x, samples = given.tensor("self"), given.tensor("random_samples")
    dims = len(x.shape) - (2 if len(samples.shape) == 3 and x.shape[0] == samples.shape[0] else 1)
    given.need(len(given["kernel_size"]) == len(given["output_size"]) == samples.shape[-1], "output_size")
    given.need(dims >= 1 and samples.dtype is x.dtype and x.dtype.is_floating_point, "random_samples")
    yield Limit("random_samples", 0, 1)


def _sampler(given: Given) -> Iterator[Limit]:
    """Where points outside of an image are moved to its border, kernels take one that is nowhere for a place in memory."""
    if given["padding_mode"] != 0:
        yield Limit("grid", -_FAR, _FAR)


def _sampler_backward(given: Given) -> Iterator[Limit]:
    gradient(aten.grid_sampler_2d.default, "grad_output")(given)
    return _sampler(given)


def _embedding_dense_backward(given: Given) -> Iterator[Limit]:
    grad, indices = given.tensor("grad_output"), given.tensor("indices")
    given.need(indices.dtype in INDICES, "indices")
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
    given.need(len(indices.shape) == 1 and indices.dtype in INDICES, "indices")
    given.need(not given.values.get("sparse"), "sparse")
    if "offsets" in given.values:
        offsets = given.tensor("offsets")
        given.need(len(offsets.shape) == 1 and offsets.dtype is indices.dtype, "offsets")
        given.need(offsets.shape[0] > 0, "offsets")  # words in no bag are counted all the same
    if given.values.get("per_sample_weights") is not None:
        given.need(given.tensor("per_sample_weights").shape == indices.shape, "per_sample_weights")


def _repeated(given: Given) -> Iterator[Limit]:
    """Given the size of its result, the kernel does not ask whether a repeat is negative."""
    if (
        isinstance(given.values.get("repeats"), TensorMeta)
        and (size := given.values.get("output_size")) is not None
    ):
        yield Limit("repeats", 0, size)


INDEXED: Final[Mapping[str, Rule]] = {
    "aten::max_pool2d_with_indices_backward": _pool_backward(aten.max_pool2d_with_indices.default, 2),
    "aten::max_pool3d_with_indices_backward": _pool_backward(aten.max_pool3d_with_indices.default, 3),
    "aten::adaptive_max_pool2d_backward": _adaptive_pool_backward(2),
    "aten::adaptive_max_pool3d_backward": _adaptive_pool_backward(3),
    "aten::fractional_max_pool2d": _fractional_pool,
    "aten::fractional_max_pool3d": _fractional_pool,
    "aten::fractional_max_pool2d_backward": _fractional_pool_backward(2),
    "aten::fractional_max_pool3d_backward": _fractional_pool_backward(3),
    "aten::_adaptive_avg_pool2d_backward": _average_pool_backward(2),
    "aten::_adaptive_avg_pool3d_backward": _average_pool_backward(3),
    "aten::grid_sampler_2d": _sampler,
    "aten::grid_sampler_2d_backward": _sampler_backward,
    "aten::embedding_dense_backward": _embedding_dense_backward,
    "aten::repeat_interleave": _repeated,
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::_embedding_bag_backward": _embedding_bag_backward,
    "aten::_embedding_bag_dense_backward": _embedding_bag_backward,
    "aten::_embedding_bag_per_sample_weights_backward": _embedding_bag_backward,
}
