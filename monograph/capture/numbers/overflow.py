"""Numbers that tensors have no room for: kernels refuse them with an error, which fake kernels do not raise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from monograph.capture.numbers.moving import is_moving, plain
from monograph.compat.modes import outside_of_modes, without_function_mode
from monograph.compat.ops import is_random, schema_of
from monograph.compat.symbolic_numbers import is_overflow

_NUMBERS = ("number", "Optional[number]")  # the types of arguments that kernels convert


def takes_numbers(func: Any) -> bool:
    """True for the ops that `check_room` is about."""
    return bool(_numbers_of(func))


def check_room(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what the kernel of an op raises for a number beyond the range of its tensors; build() may catch it."""
    numbers = _numbers_of(func)
    given = [args[place] for place in numbers if place < len(args)]
    given += [kwargs[name] for name in numbers.values() if name in kwargs]
    given = [item for item in given if type(item) in (int, float) or (is_moving(item) and item.node.is_known)]
    if not given:
        return
    dtypes = set(_dtypes([*args, *kwargs.values()])) or {torch.get_default_dtype()}
    room = min(map(_largest, dtypes))
    if not any(room < abs(_real(item)) < math.inf for item in given):
        return
    with outside_of_modes(), without_function_mode(), torch.no_grad():
        try:
            func(*map(_real, args), **{name: _real(item) for name, item in kwargs.items()})
        except RuntimeError as error:
            if is_overflow(error):
                for item in given:
                    plain(item)  # another number has another build
                raise


@cache
def _numbers_of(func: Any) -> Mapping[int, str]:
    """The places and the names of an op's arguments that are numbers for its kernel; none of ops that draw."""
    schema = schema_of(func)
    if schema is None or is_random(func):
        return {}
    return {at: arg.name for at, arg in enumerate(schema.arguments) if str(arg.type) in _NUMBERS}


def _dtypes(items: Sequence[Any]) -> Iterator[torch.dtype]:
    for item in items:
        if isinstance(item, torch.dtype):
            yield item
        elif isinstance(item, torch.Tensor):
            yield item.dtype
        elif isinstance(item, (list, tuple)):
            yield from _dtypes(item)


def _largest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).max
    return math.inf if dtype is torch.bool else torch.iinfo(dtype).max


def _real(item: Any) -> Any:
    """What can be computed with: the present value of a number, and a tensor of the same form."""
    if is_moving(item):
        return item.node.value
    if isinstance(item, (list, tuple)):
        return type(item)(map(_real, item)) if type(item) in (list, tuple) else item
    if not isinstance(item, torch.Tensor):
        return item
    return torch.ones(tuple(item.shape), dtype=item.dtype, device=item.device)
