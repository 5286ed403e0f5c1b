"""`torch.nn.functional.interpolate`, whose result may have a size that varies."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.number_arguments import resized
from monograph.compat.ops import resizing_by_ops
from monograph.ir.call.tree import flatten

_LARGEST = 31  # bits of a size
_EXACT = 53  # bits of whole numbers that are floats


def interpolated(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the ops that take sizes which vary, if one does: of the tensor, or in what it is to be."""
    leaves: list[Any] = []
    flatten((args, kwargs), leaves)
    shapes = [item.shape for item in leaves if isinstance(item, torch.Tensor)]
    shapes += [item for item in leaves if isinstance(item, torch.Size)]
    if not any(map(is_moving, (*leaves, *(size for shape in shapes for size in shape)))):
        return resized(mode, func, args, kwargs)
    given = _by_size(inspect.signature(func).bind(*args, **kwargs).arguments)
    with resizing_by_ops(_scaled):
        return resized(mode, func, (), given)


def _by_size(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments with a size in place of factors, where Python would compute the size from them as a float."""
    factors, tensor = given.get("scale_factor"), given["input"]
    is_computed = given.get("recompute_scale_factor") or given.get("mode") == "area"
    if not is_computed or factors is None or given.get("size") is not None:
        return given
    sizes = tensor.shape[2:]
    if not isinstance(factors, (list, tuple)):
        factors = [factors] * len(sizes)
    if len(factors) != len(sizes):
        return given  # which is an error
    size = [_scaled(*pair) for pair in zip(sizes, factors, strict=True)]
    return {**given, "size": size, "scale_factor": None, "recompute_scale_factor": None}


def _scaled(size: Any, factor: float) -> Any:
    """`int(size * factor)`: of a size that varies in whole numbers, where those give the same for every size."""
    if math.isfinite(factor) and factor > 0:
        above, below = factor.as_integer_ratio()
        if above.bit_length() + _LARGEST <= _EXACT:
            return size * above // below
    return int(int(size) * factor)
