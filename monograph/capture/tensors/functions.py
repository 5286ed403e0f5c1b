"""Functions of torch that a trace would record wrongly or not at all, each with what happens instead.

Every torch function that build() calls passes `call()`. Rows of the table take the fake mode, the function and its
arguments, and give its result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from monograph.capture.numbers.known import READERS, known_value
from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.checked_values import (
    all_true,
    covariance,
    least_squares,
    one_hot,
    quantile,
    with_checks,
)
from monograph.capture.tensors.gradient_formulas import FORMULAS, with_formula
from monograph.capture.tensors.number_arguments import (
    ctc_loss_of_lists,
    interpolated,
    of_plain_numbers,
    range_of,
    split_at,
    tensor_of_number,
)
from monograph.capture.tensors.recurrent_layers import cell_by_ops, is_plain_lstm, lstm_by_layers
from monograph.capture.tensors.spectral import FUNCTIONS, values_only
from monograph.compat.amp import UNSCALE
from monograph.compat.distributed.groups import shared_name
from monograph.compat.distributed.tensors import is_sharded, laid_out_as, part_of
from monograph.compat.modes import current_tracer
from monograph.compat.ops import ALL_TRUE, LEFT_ALIGNED, named_arguments
from monograph.compat.patching import replace_here
from monograph.compat.tensors import DATA_SETTER, VERSION_GETTER, storage_key
from monograph.compat.traces.nodes import traced_node
from monograph.distributed.averages import largest
from monograph.errors import AliasError, CaptureError, DataDependentError
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.memory import marked_names, memory_root
from monograph.ir.ops.fused import FUSED
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


def _set_item(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, index, value = args
    truth = isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype is torch.bool
    if truth and target.dim() == 0:
        return target.masked_fill_(index, value)  # torch would ask for the value of the mask
    return func(*args, **kwargs)


def _packs_padding(_mode: Any, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """nn.TransformerEncoder asks this in eval mode; where a gradient flows, it never packs."""
    if torch.is_grad_enabled() and args[0].requires_grad:
        return False
    raise DataDependentError(
        "nn.TransformerEncoder in eval mode packs padded sequences into a nested tensor, whose shape depends on data",
        hint="build it with enable_nested_tensor=False, in eager code too: the numbers of padded positions differ",
    )


FUSED_FUNCTIONS = frozenset(
    (*FUSED, *(getattr(torch, op.__name__.partition(".")[0]) for op in FUSED))
)  # the updates of optimizers with fused=True


def _fused(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The update of a fused optimizer, whose numbers may move: an op of our own, and copies into what it writes."""
    if _is_zero(kwargs["weight_decay"]):  # compiled code leaves it out
        kwargs = {**kwargs, "weight_decay": 0.0}
    overload = "tensor_lr" if isinstance(kwargs.get("lr"), torch.Tensor) else "default"
    in_place = func if func in FUSED else getattr(getattr(torch.ops.aten, func.__name__), overload)
    given = parts_laid_out_alike(named_arguments(in_place, args, kwargs))
    lists = {name: item for name, item in given.items() if isinstance(item, (list, tuple))}
    numbers = {name: item for name, item in given.items() if name not in lists}
    tensors = [storage_key(item) for items in lists.values() for item in items]
    if len(set(tensors)) == len(tensors):
        _update(in_place, lists, numbers)
        return
    for index in range(len(lists["self"])):  # as eager's kernel, which may find what it has just written
        _update(in_place, {name: items[index : index + 1] for name, items in lists.items()}, numbers)


def _unscaled(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a process finds in its parts of gradients counts for all: torch asks the processes of the first one alone."""
    gradients = args[0] if args else ()
    meshes = {item.device_mesh for item in gradients if is_sharded(item)}
    if not meshes:
        return func(*args, **kwargs)
    found = part_of(args[1])
    func(list(map(part_of, gradients)), found, *map(part_of, args[2:]), **kwargs)
    for mesh in meshes:
        for dim in range(mesh.ndim):
            found.copy_(largest(found, shared_name(mesh.get_group(dim))))
    return None


@contextmanager
def infinities_of_all() -> Iterator[None]:
    """Inside, a scaler that looks for infinities takes those of all processes, also where no mode sees its call."""
    with ExitStack() as stack:
        if UNSCALE is not None:
            replace_here(stack, torch, UNSCALE.__name__, _unscaled_for_all)
        yield


def _unscaled_for_all(*args: Any, **kwargs: Any) -> Any:
    return _unscaled(None, UNSCALE, args, kwargs)


def parts_laid_out_alike(given: dict[Any, Any]) -> dict[Any, Any]:
    """What this process has of DTensors, laid out as their parameter, the first of each: each element is updated by itself."""
    names = [name for name, item in given.items() if isinstance(item, (list, tuple)) and item]
    columns = []
    for items in zip(*(given[name] for name in names), strict=True):
        if len({is_sharded(item) for item in items if item.dim()}) > 1:
            return given
        columns.append([laid_out_as(item, items[0]) for item in items])
    given = given | dict(zip(names, map(list, zip(*columns, strict=True)), strict=True))
    leaves: list[Any] = []
    tree = flatten(given, leaves)
    parts: dict[Any, Any] = unflatten(tree, map(part_of, leaves))
    return parts


def _update(in_place: Any, lists: Mapping[str, Any], numbers: dict[str, Any]) -> None:
    made = FUSED[in_place](*lists.values(), **numbers)
    for name, results in zip(marked_names(in_place, writes=True), made, strict=True):
        for target, result in zip(lists[name], results, strict=True):
            target.copy_(result)


def _recurrent(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An LSTM, GRU or RNN: by ops of torch, but not by cuDNN, which looks for a buffer that holds all weights."""
    if args[0].device.type == "cuda" and torch.backends.cudnn.enabled:
        raise CaptureError(
            "build() calls a recurrent layer of cuDNN, which keeps weights where no graph sees them",
            hint="train with torch.backends.cudnn.enabled = False, in eager code too, or write the layer with nn.LSTMCell",
        )
    if func is torch.lstm and not kwargs and is_plain_lstm(args):
        return lstm_by_layers(args)
    return func(*args, **kwargs)


_WITH_INDICES: Mapping[Any, Callable[..., Any]] = {
    torch.max_pool1d: torch.max_pool1d_with_indices,
    torch.nn.functional.max_pool1d: torch.nn.functional.max_pool1d_with_indices,
}


def _largest_of_parts(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max_pool1d without indices, which asks for the number of a size, by the function that gives them and does not."""
    if not any(map(is_moving, args[0].shape)) or len(args) > 6 or kwargs.get("return_indices"):
        return func(*args, **kwargs)
    kwargs = {name: item for name, item in kwargs.items() if name != "return_indices"}
    return _WITH_INDICES[func](*args, **kwargs)[0]


def _is_zero(number: Any) -> bool:
    """True for a zero, which is a branch as in torch's formulas; False for a number that the step itself computes."""
    if isinstance(number, torch.Tensor) or (is_moving(number) and not number.node.is_known):
        return False
    return bool(number == 0)


def _read(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Python may read a tensor that is made of constants alone."""
    known = known_value(args[0], current_tracer())
    return func(*args, **kwargs) if known is None else func(known)


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
    torch.tensor: tensor_of_number,
    torch.as_tensor: tensor_of_number,
    torch.asarray: of_plain_numbers,
    torch.Tensor.new_tensor: of_plain_numbers,
    torch.Tensor.__reduce_ex__: _taken_apart,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.untyped_storage: _storage,
    torch.arange: range_of,
    torch.cov: covariance,
    torch.Tensor.cov: covariance,
    torch.linalg.lstsq: least_squares,
    torch.nn.functional.ctc_loss: ctc_loss_of_lists,
    torch.nn.functional.gaussian_nll_loss: with_checks,
    torch.nn.functional.interpolate: interpolated,
    torch.nn.functional.one_hot: one_hot,
    **dict.fromkeys(
        (torch.quantile, torch.nanquantile, torch.Tensor.quantile, torch.Tensor.nanquantile), quantile
    ),
    torch.tensor_split: split_at,
    torch.Tensor.tensor_split: split_at,
    torch.Tensor.__setitem__: _set_item,
    ALL_TRUE: all_true,
    LEFT_ALIGNED: _packs_padding,
    **dict.fromkeys(_WITH_INDICES, _largest_of_parts),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **dict.fromkeys((torch.gru_cell, torch.lstm_cell), cell_by_ops),
    **dict.fromkeys(FUSED_FUNCTIONS, _fused),
    **({} if UNSCALE is None else {UNSCALE: _unscaled}),
    **dict.fromkeys(READERS, _read),
    **dict.fromkeys(FUNCTIONS, values_only),
    **dict.fromkeys(FORMULAS, with_formula),
}
