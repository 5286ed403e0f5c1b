"""Functions of torch that a trace would record wrongly or not at all, each with what happens instead.

Every torch function that build() calls passes `call()`. Rows of the table take the fake mode, the function and its
arguments, and give its result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from monograph.capture.numbers.known import READERS, known_value
from monograph.capture.numbers.moving import is_moving, plain
from monograph.capture.tensors.formulas import FORMULAS, with_formula
from monograph.capture.tensors.spectral import FUNCTIONS, values_only
from monograph.compat.fake_values import checks_as_assertions, value_constant
from monograph.compat.modes import current_tracer
from monograph.compat.ops import ALL_TRUE, LEFT_ALIGNED, assertions_for_any, only_fault, record_assertion
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.compat.tensors import DATA_SETTER, VERSION_GETTER, is_transformed
from monograph.compat.tracing import traced_node
from monograph.errors import AliasError, CaptureError, DataDependentError
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.fused_ops import FUSED, written_by_fused
from monograph.ir.memory import memory_root
from monograph.user_code.files import is_user_file

Row = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


def call(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func`, by its row in the table or as it is."""
    row = _ROWS.get(func)
    return func(*args, **kwargs) if row is None else row(mode, func, args, kwargs)


# functions that let a tensor itself have another form, or view other memory: its holder would see that
CHANGES_FORM = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in (
        "as_strided", "resize", "resize_as", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"
    )
)  # fmt: skip


def with_plain_ints(func: Any, arguments: Any) -> Any:
    """Arguments with ints that may move as constants, but for arithmetic: they may be sizes, and places in a tensor."""
    return arguments if _name(func) in _ARITHMETIC else _plain_ints(arguments)


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
    return plain(item) if isinstance(item, torch.SymInt) else item


def _set_data(_mode: Any, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """`p.data = value` is not seen by a trace; a copy in place means the same if the form stays."""
    target, value = args
    if target.shape != value.shape or target.dtype != value.dtype:
        raise CaptureError(
            f"build() assigns to .data a tensor {tuple(value.shape)} {value.dtype} in place of "
            f"{tuple(target.shape)} {target.dtype}",
            hint="a static graph keeps shapes and dtypes; change the tensor in place",
        )
    shown, replaced = (traced_node(item, current_tracer()) for item in (value, target))
    if shown is not None and memory_root(shown).op == "placeholder" and memory_root(shown) is not replaced:
        raise AliasError(
            "build() assigns to .data the memory of a tensor that the step is given: the two would be one from now on",
            hint="change the tensor by copy_(), or assign a .clone()",
        )
    with torch.no_grad():
        target.copy_(value)


def _tensor_of_number(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.tensor(symbol)` would keep the number it has now."""
    if args and is_symbolic(args[0]):
        return _tensor_of_symbol(args[0], **kwargs)
    tracer = current_tracer()
    return value_constant(
        mode, _of_plain_numbers(mode, func, args, kwargs), lambda made: known_value(made, tracer)
    )


def _of_plain_numbers(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _address(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_user_file(sys._getframe(4).f_code.co_filename):
        raise CaptureError(
            "build() asks for the memory address of a tensor",
            hint="compare tensors with `is`, or look at addresses outside of build()",
        )
    return func(*args, **kwargs)


def _storage(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fake has a storage of its own, of another size than that which a view is of."""
    if is_user_file(sys._getframe(4).f_code.co_filename):
        raise CaptureError(
            f"build() asks for the storage of a tensor: {func.__name__}()",
            hint="look at storages outside of build()",
        )
    return func(*args, **kwargs)


def _taken_apart(_mode: Any, _func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    raise CaptureError(
        "build() takes a tensor apart, as torch.save, pickle and copy.copy do: it has no values while it is captured",
        hint="return the tensor and save it after the step; a copy is tensor.clone()",
    )


def _range(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The length depends on the numbers: symbols among them become constants of this build."""
    return func(*map(_plain_number, args), **{key: _plain_number(item) for key, item in kwargs.items()})


def _split(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Places in a tensor are read by C++ from its memory: they are read as numbers."""

    def numbers(item: Any) -> Any:
        return item.tolist() if isinstance(item, torch.Tensor) else item

    return func(args[0], *map(numbers, args[1:]), **{key: numbers(item) for key, item in kwargs.items()})


def _resize(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The size of the result depends on the numbers, which may stand in a list: as in `_range`."""
    leaves: list[Any] = []
    tree = flatten((args, kwargs), leaves)
    args, kwargs = unflatten(tree, map(_plain_number, leaves))
    return func(*args, **kwargs)


def _plain_number(item: Any) -> Any:
    return float(item) if isinstance(item, torch.SymFloat) else plain(item)


def _set_item(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, index, value = args
    truth = isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype is torch.bool
    if truth and target.dim() == 0:
        return target.masked_fill_(index, value)  # torch would ask for the value of the mask
    return func(*args, **kwargs)


def _all_true(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch.distributions checks its arguments so: the check becomes an op of the program."""
    record_assertion(func(*args, **kwargs), _said_by_distribution(sys._getframe(1)), ValueError)
    return True


def _said_by_distribution(frame: FrameType | None) -> str:
    """What eager mode says of the check of a distribution, without the values."""
    while frame is not None and not frame.f_code.co_filename.endswith(_DISTRIBUTION):
        frame = frame.f_back
    known = {} if frame is None else frame.f_locals
    checked, given = known.get("value"), known.get("self")
    constraint = known.get("constraint", known.get("support"))
    if not isinstance(checked, torch.Tensor) or constraint is None:
        return "values outside of their range: a check in build() has failed"
    kind, form = type(given).__name__, f"(Tensor of shape {tuple(checked.shape)})"
    named = type(constraint).__name__ if "ensor(" in repr(constraint) else repr(constraint)
    if "param" in known:
        return (
            f"Expected parameter {known['param']} {form} of distribution {kind} to satisfy the constraint {named}, "
            "but found invalid values"
        )
    return (
        f"Expected value argument {form} to be within the support ({named}) of the distribution {kind}, "
        "but found invalid values"
    )


def _with_checks(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that raises ValueError for wrong values: so does the program."""

    def raised(number: int) -> ValueError:
        try:
            with only_fault(number):
                func(*args, **kwargs)
        except ValueError as error:
            return error
        return ValueError("a check of values in a function of torch has failed")

    with assertions_for_any(raised):
        return func(*args, **kwargs)


def _one_hot(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Eager mode looks whether there are such classes, which C++ of torch leaves out in a trace."""
    made = func(*args, **kwargs)
    classes = args[0] if args else kwargs["input"]
    if not is_transformed(classes):  # nor does eager mode look at these
        record_assertion((classes >= 0).all(), "Class values must be non-negative.")
        record_assertion((classes < made.shape[-1]).all(), "Class values must be smaller than num_classes.")
    return made


def _quantile(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Eager mode looks whether there are such quantiles, on a CPU; C++ of torch leaves it out in a trace."""
    q = args[1] if len(args) > 1 else kwargs.get("q")
    if isinstance(q, torch.Tensor) and q.device.type == "cpu" and not is_transformed(q):
        inside = (q >= 0).logical_and(q <= 1).all()
        record_assertion(inside, "quantile() q values must be in the range [0, 1]")
    return func(*args, **kwargs)


def _covariance(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Weights may be negative or leave no degree of freedom, where eager raises or warns: the program raises."""
    tracer = current_tracer()
    with checks_as_assertions(mode, tracer, lambda tensor: known_value(tensor, tracer) is not None):
        return func(*args, **kwargs)


def _least_squares(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A matrix may have less than full rank, and then no residuals: a view that does not fit them raises."""
    solution, residuals, *rest = solved = func(*args, **kwargs)
    return type(solved)((solution, residuals.view(residuals.shape), *rest))


def _ctc_loss(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lengths in a list: C++ of torch would write them into a tensor, which has no memory in a trace."""
    lengths = {name: torch.tensor(item) for name, item in kwargs.items() if isinstance(item, (list, tuple))}
    args = tuple(torch.tensor(item) if isinstance(item, (list, tuple)) else item for item in args)
    return func(*args, **{**kwargs, **lengths})


def _packs_padding(_mode: Any, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """nn.TransformerEncoder asks this in eval mode; where a gradient flows, it never packs."""
    if torch.is_grad_enabled() and args[0].requires_grad:
        return False
    raise DataDependentError(
        "nn.TransformerEncoder in eval mode packs padded sequences into a nested tensor, whose shape depends on data",
        hint="build it with enable_nested_tensor=False, in eager code too: the numbers of padded positions differ",
    )


def _fused(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The update of a fused optimizer, whose numbers may move: an op of our own, and copies into what it writes."""
    if _is_zero(kwargs["weight_decay"]):  # compiled code leaves it out
        kwargs = {**kwargs, "weight_decay": 0.0}
    overload = "tensor_lr" if isinstance(kwargs.get("lr"), torch.Tensor) else "default"
    in_place = func if func in FUSED else getattr(getattr(torch.ops.aten, func.__name__), overload)
    made = FUSED[in_place](*args, **kwargs)
    for targets, results in zip(written_by_fused(in_place, args, kwargs), made, strict=True):
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)


def _is_zero(number: Any) -> bool:
    """True for a zero, which is a branch as in torch's formulas; False for a number that the step itself computes."""
    if isinstance(number, torch.Tensor) or (is_moving(number) and not number.node.is_known):
        return False
    return bool(number == 0)


def _read(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Python may read a tensor that is made of constants alone."""
    known = known_value(args[0], current_tracer())
    return func(*args, **kwargs) if known is None else func(known)


_DISTRIBUTION = os.path.join("torch", "distributions", "distribution.py")
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
CHECKED_BY_PROGRAM = frozenset({torch.cov, torch.Tensor.cov})  # what they ask for becomes an assertion
ASK_FOR_INFERENCE = frozenset({torch.is_inference, torch.Tensor.is_inference})
# what they give is of fakes, and nothing can notice later that it would be another
UNGUARDED: Mapping[Any, str] = {
    torch.Tensor.__repr__: "the text of a tensor",
    torch.Tensor.__format__: "the text of a tensor",
    VERSION_GETTER: "the version of a tensor",
}
_ROWS: Mapping[Any, Row] = {
    DATA_SETTER: _set_data,
    torch.tensor: _tensor_of_number,
    torch.as_tensor: _tensor_of_number,
    torch.asarray: _of_plain_numbers,
    torch.Tensor.new_tensor: _of_plain_numbers,
    torch.Tensor.__reduce_ex__: _taken_apart,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.untyped_storage: _storage,
    torch.arange: _range,
    torch.cov: _covariance,
    torch.Tensor.cov: _covariance,
    torch.linalg.lstsq: _least_squares,
    torch.nn.functional.ctc_loss: _ctc_loss,
    torch.nn.functional.gaussian_nll_loss: _with_checks,
    torch.nn.functional.interpolate: _resize,
    torch.nn.functional.one_hot: _one_hot,
    **dict.fromkeys(
        (torch.quantile, torch.nanquantile, torch.Tensor.quantile, torch.Tensor.nanquantile), _quantile
    ),
    torch.tensor_split: _split,
    torch.Tensor.tensor_split: _split,
    torch.Tensor.__setitem__: _set_item,
    ALL_TRUE: _all_true,
    LEFT_ALIGNED: _packs_padding,
    **dict.fromkeys(FUSED, _fused),
    **{getattr(torch, op.__name__.partition(".")[0]): _fused for op in FUSED},
    **dict.fromkeys(READERS, _read),
    **dict.fromkeys(FUNCTIONS, values_only),
    **dict.fromkeys(FORMULAS, with_formula),
}
