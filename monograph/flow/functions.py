"""Functions on tensors that OneFlow has under names which PyTorch has not."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from monograph import SignatureError

Shape = Sequence[int]
Bounds = Sequence[Sequence[int | None]]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values in another dtype."""
    return x.to(dtype)


def broadcast_like(x: Tensor, like_tensor: Tensor, broadcast_axes: Sequence[int] = ()) -> Tensor:
    """`x` in the shape of `like_tensor`; the axes of that shape in `broadcast_axes` are new ones of `x`.

    >>> broadcast_like(torch.tensor([1, 2]), torch.zeros(2, 3), [1])
    tensor([[1, 1, 1],
            [2, 2, 2]])
    """
    rank = like_tensor.dim()
    if x.dim() + len(broadcast_axes) == rank:
        for axis in sorted(axis % rank for axis in broadcast_axes):
            x = x.unsqueeze(axis)
    return x.expand_as(like_tensor)


def batch_gather(input: Tensor, indices: Tensor) -> Tensor:
    """Of each row of the batch the items at `indices`: `output[b, i] = input[b, indices[b, i]]`.

    `indices` has the shape (*batch, n), `input` (*batch, m, *rest), the result (*batch, n, *rest).
    """
    axis = indices.dim() - 1
    rest = input.shape[axis + 1 :]
    shown = indices.reshape(*indices.shape, *(1 for _ in rest)).expand(*indices.shape, *rest)
    return input.gather(axis, shown)


def gather_nd(params: Tensor, indices: Tensor) -> Tensor:
    """The items of `params` at coordinates, which are along the last axis of `indices`.

    >>> gather_nd(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0, 1], [1, 0]]))
    tensor([2, 3])
    """
    return params[_coordinates(indices)]


def scatter_nd(index: Tensor, update: Tensor, shape: Shape) -> Tensor:
    """Zeros of a shape with `update` added at coordinates; where several meet, they add up."""
    return update.new_zeros(tuple(shape)).index_put(_coordinates(index), update, accumulate=True)


def tensor_scatter_nd_update(tensor: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of `tensor` with `updates` at coordinates."""
    return tensor.index_put(_coordinates(indices), updates)


def slice(input: Tensor, slice_tup_list: Bounds) -> Tensor:
    """A part of a tensor: (start, stop, step) for each axis, None for "all of it".

    >>> slice(torch.arange(6), [(1, 6, 2)])
    tensor([1, 3, 5])
    """
    return input[_slices(slice_tup_list)].clone()


def slice_update(input: Tensor, update: Tensor, slice_tup_list: Bounds) -> Tensor:
    """Write `update` into a part of `input`, in place, and return `input`."""
    input[_slices(slice_tup_list)] = update
    return input


def in_top_k(targets: Tensor, predictions: Tensor, k: int) -> Tensor:
    """True for the rows whose target is among the `k` classes of the highest predictions; ties count as in."""
    of_target = predictions.gather(1, targets.long().unsqueeze(1))
    known = torch.isfinite(of_target).squeeze(1)
    return ((predictions > of_target).sum(1) < k) & known


def roc_auc_score(label: Tensor, pred: Tensor) -> Tensor:
    """The area under the ROC curve, shape (1,): the share of pairs of a positive and a negative in right order."""
    values, truth = pred.flatten().double(), label.flatten() != 0
    ordered = values.sort().values
    below = torch.searchsorted(ordered, values)
    ranks = (
        below + torch.searchsorted(ordered, values, right=True) + 1
    ).double() / 2  # ties share their ranks
    positive = truth.sum().double()
    negative = truth.numel() - positive
    area = ((ranks * truth).sum() - positive * (positive + 1) / 2) / (positive * negative)
    return area.float().reshape(1)


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 * x)` (https://arxiv.org/abs/1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def depend(input: Tensor, depend: Tensor | Sequence[Tensor]) -> Tensor:
    """`input`. A program keeps the order of build(), so nothing can move in front of `depend`."""
    return input


def as_classes(labels: Tensor) -> Tensor:
    """Class numbers as PyTorch's losses take them: of int8, int16 and int32 as int64; what is no such number stays."""
    return labels.long() if labels.dtype in (torch.int8, torch.int16, torch.int32) else labels


def cross_entropy(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """PyTorch's `cross_entropy`, with labels of any type of integers."""
    return F.cross_entropy(input, as_classes(target), *args, **options)


def nll_loss(input: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """PyTorch's `nll_loss`, with labels of any type of integers."""
    return F.nll_loss(input, as_classes(target), *args, **options)


def one_hot(input: Tensor, num_classes: int = -1, on_value: Any = 1, off_value: Any = 0) -> Tensor:
    """PyTorch's `one_hot`, with labels of any type of integers; `on_value` and `off_value` are OneFlow's."""
    hot = F.one_hot(as_classes(input), num_classes)
    return hot if (on_value, off_value) == (1, 0) else torch.where(hot == 1, on_value, off_value)


def sparse_softmax_cross_entropy(labels: Tensor, logits: Tensor) -> Tensor:
    """The cross entropy of each row of logits (N, C) with its class number (N,)."""
    return F.cross_entropy(logits, labels.long(), reduction="none")


def ctc_greedy_decoder(
    log_probs: Tensor, input_lengths: Tensor, merge_repeated: bool = True
) -> tuple[Tensor, Tensor]:
    """The most likely path of each sample: (N, T) class numbers without blanks, padded with 0, and (N, 1) scores.

    `log_probs` is (T, N, C), the last class is the blank, `input_lengths` (N,). The score is the sum of the negated
    maxima. With `merge_repeated` a class that follows itself counts once.
    """
    steps, count, classes = log_probs.shape
    best, path = log_probs.max(2)
    inside = torch.arange(steps, device=path.device).unsqueeze(1) < input_lengths.unsqueeze(0)
    kept = inside & (path != classes - 1)
    if merge_repeated:
        before = torch.cat([torch.full_like(path[:1], -1), path[:-1]])
        kept = kept & (path != before)
    position = torch.where(
        kept, kept.cumsum(0) - 1, steps
    )  # what is not kept goes to a column that is cut off
    decoded = path.new_zeros(steps + 1, count).scatter(0, position, path)
    return decoded[:steps].t().contiguous(), -(best * inside).sum(0).unsqueeze(1)


def dtypes() -> list[torch.dtype]:
    """The dtypes that OneFlow's programs know."""
    names = "bool float32 float16 bfloat16 float64 int8 int32 int64 uint8 complex64 complex128"
    return [getattr(torch, name) for name in names.split()]


def convert_oneflow_dtype_to_numpy_dtype(oneflow_dtype: torch.dtype) -> Any:
    """NumPy's type of a dtype; bfloat16 has none.

    >>> convert_oneflow_dtype_to_numpy_dtype(torch.float32).__name__
    'float32'
    """
    if oneflow_dtype is torch.bfloat16:
        raise SignatureError("NumPy has no bfloat16", hint="convert the tensor to float32 first")
    return torch.empty(0, dtype=oneflow_dtype).numpy().dtype.type if oneflow_dtype != torch.bool else np.bool_


def _coordinates(indices: Tensor) -> tuple[Tensor, ...]:
    return tuple(indices.long().unbind(-1))


def _slices(bounds: Bounds) -> tuple[Any, ...]:
    return tuple(builtins.slice(None) if bound is None else builtins.slice(*bound) for bound in bounds)
