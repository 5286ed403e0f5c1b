"""Functions of torch that take numbers which may move: as numbers of the trace, or as constants of this build.

Each row takes the fake mode, the function and its arguments, and gives its result.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from monograph.capture.numbers.known import known_value
from monograph.capture.numbers.moving import expression_of, is_moving, plain
from monograph.compat.fake_values import value_constant
from monograph.compat.modes import current_tracer
from monograph.compat.patching import resizing_by_ops
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.ir.call.tree import flatten, unflatten

_ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "true_divide",
        "pow",
        "addcmul",
        "addcdiv",
        "lerp",
        "where",
        "fill",
        "masked_fill",
        "clamp",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "tensor",
        "as_tensor",
        "sym_float",
        "sym_max",
        "sym_min",
    ]
)


_LARGEST = 31  # bits of a size
_EXACT = 53  # bits of whole numbers that are floats
_FILLED = frozenset(["full", "full_like"])  # the first argument is a size, or a tensor


def with_plain_ints(func: Any, arguments: Any) -> Any:
    """Arguments with ints that may move as constants, but for arithmetic: they may be places in a tensor. Sizes stay."""
    name = _name(func)
    if name in _FILLED and isinstance(arguments, tuple):
        return (*_plain_ints(arguments[:1]), *arguments[1:])
    if name in _FILLED:
        return {key: item if key == "fill_value" else _plain_ints(item) for key, item in arguments.items()}
    return arguments if name in _ARITHMETIC else _plain_ints(arguments)


def _name(func: Any) -> str:
    """The name of a function without what says that it works in place, or is reflected."""
    name = str(getattr(func, "__name__", "")).removeprefix("_foreach_").strip("_")
    return name[1:] if name[:1] in ("r", "i") and name[1:] in _ARITHMETIC else name


def _plain_ints(item: Any) -> Any:
    kind = type(item)
    if kind in (list, tuple):
        return kind(map(_plain_ints, item))
    if kind is dict:
        return {key: _plain_ints(entry) for key, entry in item.items()}
    if kind is slice:
        return slice(*map(_plain_ints, (item.start, item.stop, item.step)))
    return _plain_unless_size(item) if isinstance(item, torch.SymInt) else item


def _plain_unless_size(item: Any) -> Any:
    return item if expression_of(item) is not None else plain(item)


def tensor_of_number(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.tensor(symbol)` would keep the number it has now."""
    if args and is_symbolic(args[0]):
        return _tensor_of_symbol(args[0], **kwargs)
    tracer = current_tracer()
    return value_constant(
        mode, of_plain_numbers(mode, func, args, kwargs), lambda made: known_value(made, tracer)
    )


def of_plain_numbers(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Numbers in a list are written into memory by C++, which reads a symbol among them wrongly: they are constants."""
    leaves: list[Any] = []
    tree = flatten((args, kwargs), leaves)
    args, kwargs = unflatten(tree, map(plain, leaves))
    return func(*args, **kwargs)


def _tensor_of_symbol(
    number: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any
) -> torch.Tensor:
    """As `torch.tensor` makes it: what is too large for a type becomes an infinity, where torch.full raises."""
    own = {torch.SymBool: torch.bool, torch.SymFloat: torch.get_default_dtype()}
    kinds = (kind for kind in own if isinstance(number, kind))
    wide = torch.scalar_tensor(
        number, dtype=torch.int64 if isinstance(number, torch.SymInt) else torch.float64, **options
    )
    made = wide.to(dtype or own.get(next(kinds, torch.SymInt), torch.int64))
    return made.requires_grad_() if requires_grad else made


def range_of(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The length depends on the numbers: symbols among them become constants of this build."""
    return func(*map(_plain_number, args), **{key: _plain_number(item) for key, item in kwargs.items()})


def split_at(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Places in a tensor are read by C++ from its memory: they are read as numbers."""

    def numbers(item: Any) -> Any:
        return item.tolist() if isinstance(item, torch.Tensor) else item

    return func(args[0], *map(numbers, args[1:]), **{key: numbers(item) for key, item in kwargs.items()})


def resized(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The size of the result depends on the numbers, which may stand in a list: as in `range_of`."""
    leaves: list[Any] = []
    tree = flatten((args, kwargs), leaves)
    args, kwargs = unflatten(tree, map(_plain_number, leaves))
    return func(*args, **kwargs)


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


def _plain_number(item: Any) -> Any:
    return float(item) if isinstance(item, torch.SymFloat) else _plain_unless_size(item)


def ctc_loss_of_lists(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lengths in a list: C++ of torch would write them into a tensor, which has no memory in a trace."""
    lengths = {name: torch.tensor(item) for name, item in kwargs.items() if isinstance(item, (list, tuple))}
    args = tuple(torch.tensor(item) if isinstance(item, (list, tuple)) else item for item in args)
    return func(*args, **{**kwargs, **lengths})
