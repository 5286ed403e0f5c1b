"""Ops that ask for values: with what they get, they are numbers of Python, or other ops whose results have known sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from monograph.capture.tensors.reading_program import ITEM
from monograph.capture.tensors.readings import UNKNOWN, Readings

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # records an op
_aten = torch.ops.aten
_COUNT = ((_aten.count_nonzero.default,), ITEM)
_TOTAL = ((_aten.sum.default,), ITEM)
_TOO_LARGE = (
    "bincount() of values that the step computes has minlength results, and a value is not below minlength"
)


def asks_for_values(func: Any) -> bool:
    """True for the ops that `answer` is about."""
    return torch.Tag.data_dependent_output in func.tags or func in _SIZED


def answer(readings: Readings, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op that asks for values, UNKNOWN where they are not known; `run` records another op."""
    if torch.Tag.data_dependent_output in func.tags:
        return UNKNOWN if readings.silent or kwargs else readings.ask(((func,),), args)
    row = _SIZED.get(func)
    return UNKNOWN if row is None else row(readings, run, *args, **kwargs)


def _nonzero(readings: Readings, run: Run, mask: torch.Tensor) -> Any:
    count = readings.ask(_COUNT, (mask,))
    if count is UNKNOWN:
        return UNKNOWN
    if mask.dim() == 0:  # no column
        return run(_aten.new_empty.default, (mask, (count, 0)), {"dtype": torch.int64})
    found = run(_aten.nonzero_static.default, (mask,), {"size": count})
    # eager mode lays them out column by column
    columns = run(_aten.t.default, (found,), {})
    columns = run(_aten.clone.default, (columns,), {"memory_format": torch.contiguous_format})
    return run(_aten.t.default, (columns,), {})


def _columns(readings: Readings, run: Run, mask: torch.Tensor) -> Any:
    found = _nonzero(readings, run, mask)
    return found if found is UNKNOWN else run(_aten.unbind.int, (found, 1), {})


def _index(readings: Readings, run: Run, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    placed: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        columns = _columns(readings, run, index) if is_mask and index is not None else (index,)
        if columns is UNKNOWN:
            return UNKNOWN
        placed += columns
    unchanged = all(a is b for a, b in zip(placed, indices, strict=False))
    return UNKNOWN if unchanged else run(_aten.index.Tensor, (tensor, placed), {})


def _masked_select(readings: Readings, run: Run, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    if readings.ask(_COUNT, (mask,)) is UNKNOWN:
        return UNKNOWN
    whole, mask = (run(_aten.expand.default, (item, shape), {}) for item in (tensor, mask))
    if not shape:
        whole, mask = (run(_aten.unsqueeze.default, (item, 0), {}) for item in (whole, mask))
    columns = _columns(readings, run, mask)
    return UNKNOWN if columns is UNKNOWN else run(_aten.index.Tensor, (whole, list(columns)), {})


def _repeats(readings: Readings, run: Run, repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    if output_size is not None:
        return UNKNOWN
    size = readings.ask(_TOTAL, (repeats,))
    if size is UNKNOWN:
        return UNKNOWN
    # given the size, the kernel believes that no repeat is negative
    counted = run(_aten.all.default, (run(_aten.ge.Scalar, (repeats, 0), {}),), {})
    run(_aten._assert_async.msg, (counted, "repeats can not be negative"), {})
    return run(_aten.repeat_interleave.Tensor, (repeats,), {"output_size": size})


def _bincount(
    readings: Readings, run: Run, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> Any:
    if (
        x.dim() != 1
        or x.is_floating_point()
        or minlength < 0
        or (weights is not None and weights.shape != x.shape)
    ):
        return UNKNOWN
    if x.numel() == 0:
        return run(_aten.new_zeros.default, (x, (minlength,)), {"dtype": torch.int64})
    needed = (_aten.amax.default,), (_aten.to.dtype, torch.int64), (_aten.add.Scalar, 1)
    if readings.is_within((*needed, ITEM), (x,), minlength):  # a size that varies stays one
        size = minlength
    else:
        size = readings.ask((*needed, (_aten.clamp_min.default, minlength), ITEM), (x,))
    if size is UNKNOWN:
        if minlength == 0:
            return UNKNOWN
        size = minlength  # the values are computed: the size is that of the usual case, and any other one is an error
        within = run(_aten.all.default, (run(_aten.lt.Scalar, (x, size), {}),), {})
        run(_aten._assert_async.msg, (within, _TOO_LARGE), {})
    counted = run(_aten.all.default, (run(_aten.ge.Scalar, (x, 0), {}),), {})
    run(_aten._assert_async.msg, (counted, "bincount only supports 1-d non-negative integral inputs."), {})
    index = run(_aten._to_copy.default, (x,), {"dtype": torch.int64})
    if weights is None:
        kind = torch.int64
        added = run(_aten.new_ones.default, (x, x.shape), {"dtype": kind})
    else:
        kind = torch.float32 if weights.dtype is torch.float32 else torch.float64
        added = run(_aten._to_copy.default, (weights,), {"dtype": kind})
    zeros = run(_aten.new_zeros.default, (x, (size,)), {"dtype": kind})
    return run(_aten.index_add.default, (zeros, 0, index, added), {})


def _unique(
    readings: Readings,
    run: Run,
    x: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    if x.is_floating_point() or not sorted or return_inverse or x.numel() == 0:
        return UNKNOWN
    # of the values in order: the first, and each that is not the one before
    changes = readings.ask(
        ((_aten.reshape.default, [-1]), (_aten.msort.default,), (_aten.diff.default,), *_COUNT), (x,)
    )
    if changes is UNKNOWN:
        return UNKNOWN
    flat = run(_aten.reshape.default, (x, [-1]), {})
    values = run(_aten.sort.default, (flat,), {})[0]
    changed = run(_aten.ne.Tensor, (_part(run, values, 1, None), _part(run, values, 0, -1)), {})
    places = run(_aten.add.Tensor, (_nonzero_places(run, changed, changes), 1), {})
    first, end = (run(_aten.new_full.default, (places, (1,), place), {}) for place in (0, x.numel()))
    places = run(_aten.cat.default, ([first, places, end],), {})
    starts, nothing = _part(run, places, 0, -1), run(_aten.new_empty.default, (places, (0,)), {})
    counts = nothing
    if return_counts:
        counts = run(_aten.sub.Tensor, (_part(run, places, 1, None), starts), {})
    return run(_aten.index.Tensor, (values, [starts]), {}), nothing, counts


def _nonzero_places(run: Run, mask: torch.Tensor, count: int) -> Any:
    found = run(_aten.nonzero_static.default, (mask,), {"size": count})
    return run(_aten.reshape.default, (found, [-1]), {})


def _part(run: Run, tensor: torch.Tensor, start: int, end: int | None) -> Any:
    return run(_aten.slice.Tensor, (tensor, 0, start, end), {})


def _plain_sizes(_readings: Readings, _run: Run, tensor: torch.Tensor) -> Any:
    """Code in C++ asks for numbers: each is one of this build, and no op is recorded for it."""
    return tuple(map(int, tensor.shape))


_SIZED: Mapping[Any, Callable[..., Any]] = {
    _aten.size.default: _plain_sizes,
    _aten.nonzero.default: _nonzero,
    _aten.index.Tensor: _index,
    _aten.masked_select.default: _masked_select,
    _aten.repeat_interleave.Tensor: _repeats,
    _aten.bincount.default: _bincount,
    _aten._unique2.default: _unique,
}
