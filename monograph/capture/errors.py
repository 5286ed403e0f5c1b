"""From whatever went wrong in a trace to an error for the user: what happened, at which line, what to do."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from monograph.compat.fake_values import op_that_failed
from monograph.compat.fakes import DATA_DEPENDENT, UNSUPPORTED_OP
from monograph.compat.symbolic_numbers import is_overflow
from monograph.distributed.zero import is_of_zero
from monograph.errors import (
    DataDependentError,
    DistributedError,
    MonographError,
    UnsupportedTensorError,
    capture_error_of,
    first_line,
)
from monograph.state.find import Owned
from monograph.user_code.files import is_installed_file, is_user_file
from monograph.user_code.lines import Origin, source_of, step_place, user_place_of
from monograph.user_code.tracebacks import is_of_eager_mode, own_frames

_IN_A_FORMAT = "FakeTensor.__format__"
_VALUE_READ = (  # what is said where code asks a fake for its values
    "its data is not allocated yet",
    "is not supported for tensor subclasses",
    _IN_A_FORMAT,
    "SymBool",
    "SymFloat",
    "SymInt",
    "got MovingInt",  # an index
)

_NUMBERS_OF_CLASSES = (
    "what numbers classes or rows is of an integer type: mg.spec(shape, torch.int64), since without a dtype it is "
    "float32; a tensor gets it by .long()"
)
_DENSE_DECAY = (
    "weight_decay takes dense gradients: leave it out for what has sparse ones, in a param group of its own, or give the "
    "embedding sparse=False"
)
_HINTS = {  # for what torch says
    "weight_decay option is not compatible with sparse gradients": _DENSE_DECAY,
    "add(sparse, dense) is not supported": f"write add(dense, sparse); in an optimizer, {_DENSE_DECAY}",
    "`fused` does not support sparse grad": "leave fused=True out, or give the embedding sparse=False",
    "Expected dtype int32/int64 for index": _NUMBERS_OF_CLASSES,
    "scalar types: Long, Int": _NUMBERS_OF_CLASSES,
    "expected scalar type Long but found": _NUMBERS_OF_CLASSES,
    "tensors used as indices must be long": _NUMBERS_OF_CLASSES,
    "only applicable to index tensor": _NUMBERS_OF_CLASSES,
    "expected target to have an integer dtype": _NUMBERS_OF_CLASSES,
    "expected target dtype to be Long or Byte": _NUMBERS_OF_CLASSES,
    "implicitly created only for scalar outputs": "make the loss a scalar before its backward(): loss.sum() or loss.mean()",
}
_PACKED = (
    "pack_padded_sequence() and what takes a PackedSequence read the lengths of the sequences in C++, where the step has "
    "no values yet",
    "give a module of one direction the padded sequences, and mask what it makes of the padding: its last state is at lengths - 1, "
    "and not what it returns as such; a bidirectional one would read the padding first: write it as two, as docs/porting.md "
    'shows under "Sizes and loops that values decide"',
)
_NESTED = (
    "build() makes a nested tensor, whose sizes are data",
    "compute with a padded tensor and a mask, or with a list of tensors",
)
_COUNTED = (
    "nonzero(), which a boolean mask, argwhere() and torch.where(mask) call, has as many results as the step computes",
    "keep the size: torch.where(mask, x, 0), and mask.sum() for how many there are; a mask that is made before the step can "
    "be an argument",
)
_DISTINCT = (
    "unique() has as many results as there are distinct values, which the step computes",
    "keep the size: x.sort().values, in which torch.where(diff != 0, ...) of its diff() marks where another value begins; or "
    "call it before the step",
)
_ASKED = (
    "Python asked for the value of a tensor while the step was being captured",
    "return it, and look at it outside of build(); or keep it a tensor: torch.where or torch.cond for a branch, "
    "torch.clamp or torch.maximum for max(), padding for a boolean mask. A number to compute with can be tensor.item()",
)
_FORMATTED = (
    'Python asked for the value of a tensor for a text, as in f"{loss:.4f}", while the step was being captured',
    "return it, and print it after the call; to decide by it in the step: torch.where",
)
_OF_VALUES: Mapping[str, tuple[str, str]] = {  # of ops of torch that ask for values: what to say, what to do
    "nonzero": _COUNTED,
    "index": _COUNTED,
    "masked_select": (
        "masked_select() has as many results as the step computes",
        _COUNTED[1],
    ),
    "_unique2": _DISTINCT,
    "unique_dim": _DISTINCT,
    "unique_consecutive": _DISTINCT,
    "bincount": (
        "bincount() has as many results as the largest value says, which the step computes",
        "with a number n of kinds that is fixed: torch.zeros(n, dtype=torch.long).index_add_(0, x, torch.ones_like(x)); with "
        "torch.where(mask, 1, 0) in the place of the ones, it counts some",
    ),
    "repeat_interleave": (
        "repeat_interleave() has as many results as the repeats add up to, which the step computes",
        "give output_size=..., if the sum is fixed; else repeat each as often as the most, and torch.where(mask, x, 0)",
    ),
    "equal": (
        "torch.equal() gives a bool of Python, and the step has not computed the values yet",
        "(a == b).all() is a tensor, by which torch.where(it, x, y) chooses",
    ),
    "allclose": (
        "torch.allclose() gives a bool of Python, and the step has not computed the values yet",
        "torch.isclose(a, b).all() is a tensor, by which torch.where(it, x, y) chooses",
    ),
}
_READ_IN_TORCH = {  # by the file or folder of torch whose functions read values: what to say, what to do
    os.path.join("torch", "nn", "utils", "rnn.py"): _PACKED,
    os.path.join("torch", "nn", "modules", "rnn.py"): _PACKED,
    os.path.join("torch", "nested", "__init__.py"): _NESTED,
    os.path.join("torch", "nested", "_internal", "nested_tensor.py"): _NESTED,
    os.path.join("torch", "nn", "utils", "clip_grad.py"): (
        "error_if_nonfinite=True asks for the norm of the gradients while the step is being captured",
        "leave that option out: config.detect_nonfinite() raises for what is not finite, and keeps the state",
    ),
    os.path.join("torch", "utils", "data", ""): (
        "build() takes a batch of a data loader while the step is being captured",
        "take the batch before the call, and pass it as an argument: for x, y in loader: step(x, y)",
    ),
}
_AFTER_THE_STEP = "return the predictions, and call its update(pred, y) after the step"
_OF_METRICS = (  # by methods of torchmetrics: what the user's line does, and what to do instead
    (
        {"_merge_compute_groups"},
        "updates a collection, which compares its metrics: MetricCollection(..., compute_groups=False) does not",
    ),
    (
        {"forward", "compute"},
        "calls a metric, which computes the value of the batch: in build() write its update(pred, y), and call its compute() "
        "after the step",
    ),
    (
        {"compute"},
        "computes a metric: in build() write its update(pred, y) alone, and call its compute() after the step",
    ),
    (
        {"_cast_and_nan_check_input"},
        f'updates a metric that looks for NaNs: nan_strategy="disable" does not; or {_AFTER_THE_STEP}',
    ),
    ({"update"}, f"updates a metric that looks at values: {_AFTER_THE_STEP}"),
)
_MIXED = "mixed torch.Tensor and DTensor"
_WHOLE_IN_MODULES = (
    "a parameter in parts is whole where code of a module reads it by its name, as self.weight or self.child.weight in a "
    "forward; elsewhere, and from parameters(), it is a DTensor: its full_tensor() is whole, too"
)
_SHARE_BOTH = (
    "share both: mg.distributed.to_global(model, placement, sbp.broadcast); or give the part of this process: "
    "x.to_local(), which is the batch of enable_data_parallel(), enable_zero() and wrapped models"
)
_OTHER_MESH = ("different mesh", "cross-mesh", "different device mesh")
_ONE_MESH = "put all on one: mg.distributed.to_global(x, placement, sbp), with the placement of the model's parameters"
_NO_GRADIENT = "does not require grad and does not have a grad_fn"
_WITHOUT_GRAD = (
    "the step is called under torch.no_grad() or inference_mode(), where backward() has nothing to follow: call it "
    "outside of that; to validate, use a Graph without optimizer, or the model itself"
)
_DETACHED = (
    "nothing that the loss is computed from is trained: look for detach(), .item() and argmax() on its way, and for "
    "parameters with requires_grad=False"
)
_OF_OPS = (RuntimeError, ValueError, IndexError)
_OF_CAPTURE = (
    "FakeTensor",
    "fake",
    "Meta",
    "meta",
    "aten",
    "data pointer",
    "storage",
    "symbolic",
)  # not in eager mode
_ANY_HINT = (
    "graph.eager(...) runs the same step without a capture: if it fails there too, the step is at fault"
)


def _has_parts(owned: Owned) -> bool:
    """True if the graph has laid out parameters itself."""
    return any(is_of_zero(item) for module in owned.modules.values() for item in module.parameters())


def translated(error: Exception, owned: Owned) -> Exception:
    """The error for the user: what happened at which of their lines, in which module, and what to do."""
    place = user_place_of(error)
    if not place.file:  # build() itself is not the user's: of mg.train_graph, for example
        place = step_place()
    place = replace(place, module=_module_of(error, owned.named_modules()))
    asks = type(error).__name__ in DATA_DEPENDENT or any(text in str(error) for text in _VALUE_READ)
    if (asks or isinstance(error, DataDependentError)) and (known := _read_in_torch(error)) is not None:
        message, hint = known
        return DataDependentError(message, where=place, hint=hint)
    if isinstance(error, MonographError):
        if error.where is None and place.file:
            error.where = place
        elif error.where is not None and not error.where.module:
            error.where = replace(error.where, module=place.module)
        if isinstance(error, DataDependentError) and error.where is not None and not error.source:
            error.source = source_of(error.where)
        return error
    if asks:
        asked = _FORMATTED if _IN_A_FORMAT in str(error) else _ASKED
        message, hint = _OF_VALUES.get(op_that_failed(error), asked)
        read_here = DataDependentError(message, where=place, hint=_of_metric(error) or hint)
        read_here.source = source_of(place)
        return read_here
    if type(error).__name__ == UNSUPPORTED_OP and "_nested_" in str(error):
        return UnsupportedTensorError(_NESTED[0], where=place, hint=_NESTED[1])
    if any(text in str(error) for text in _OTHER_MESH):
        return DistributedError(
            f"build() meets tensors of several meshes: {error}", where=place, hint=_ONE_MESH
        )
    if _MIXED in str(error):
        return DistributedError(
            f"build() computes with a tensor that processes share and one of this process: {error}",
            where=place,
            hint=f"{_WHOLE_IN_MODULES}; or {_SHARE_BOTH}" if _has_parts(owned) else _SHARE_BOTH,
        )
    if is_overflow(error):
        return error  # the kernel's own, as in eager mode
    if own_frames(error):
        error.args = tuple(
            arg.replace("FakeTensor", "Tensor") if isinstance(arg, str) else arg for arg in error.args
        )
        if is_of_eager_mode(error) and place.file:
            error.add_note(str(place))
        return error  # raised by the user's own code: theirs to see as it is
    kind = capture_error_of(error)
    made = kind(f"capture failed: {first_line(error)}", where=place, hint=_hint_of(error, place))
    made.source = source_of(place)
    return made


def _read_in_torch(error: Exception) -> tuple[str, str] | None:
    """What to say of functions of torch that have asked for values, and what to do."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    return next(
        (known for file, known in _READ_IN_TORCH.items() if any(file in name for name in files)), None
    )


def _of_metric(error: Exception) -> str:
    """What to write where a metric of torchmetrics has asked for values, with the user's line; empty if none has."""
    line, methods = "", []
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__")).startswith("torchmetrics."):
            methods.append(frame.f_code.co_name)
        elif is_user_file(file) and not is_installed_file(file):
            line = f"{os.path.basename(file)}:{number}"
    hint = next((text for of_method, text in _OF_METRICS if of_method <= set(methods)), "")
    return f"{line or 'build()'} {hint}" if hint else ""


def _hint_of(error: Exception, place: Origin) -> str:
    said = str(error)
    if _NO_GRADIENT in said:
        return _DETACHED if torch.is_grad_enabled() else _WITHOUT_GRAD
    return next(
        (hint for text, hint in _HINTS.items() if text in said), "" if _is_clear(error, place) else _ANY_HINT
    )


def _is_clear(error: Exception, place: Origin) -> bool:
    """True for what an op says of its arguments at a line of the user or in a module: eager mode says the same."""
    is_of_op = isinstance(error, _OF_OPS) and not isinstance(error, NotImplementedError)
    is_placed = bool(user_place_of(error).file or place.module)
    return is_of_op and is_placed and not any(text in str(error) for text in _OF_CAPTURE)


def _module_of(error: BaseException, modules: Mapping[str, nn.Module]) -> str:
    """The innermost held module in whose code it happened."""
    paths, found = {id(module): path for path, module in modules.items()}, ""
    entry = error.__traceback__
    while entry is not None:
        found = paths.get(id(entry.tb_frame.f_locals.get("self")), found)
        entry = entry.tb_next
    return found
