"""Whether a call failed because its arguments are unlike those of the calls before."""

from __future__ import annotations

import copyreg
import re
from collections.abc import Sequence
from typing import Any, Final

from monograph.errors import CaptureError, MonographError, SignatureError, is_named
from monograph.ir.call.misfit import misfit
from monograph.ir.call.parameters import unpacking
from monograph.ir.call.signature import Call, Signature, Spec, TensorKey
from monograph.ir.call.tree import unflatten
from monograph.ir.call.varying import Varying
from monograph.user_code.lines import user_place_of
from monograph.user_code.tracebacks import raised_by_user

_OF_SIZES: Final = re.compile(r"capture failed: .*\b(sizes?|shapes?|dimensions?|length)\b")  # what torch says
_SHOWN: Final = 4  # arguments


def misfit_behind(error: BaseException, call: Call, known: Sequence[Signature]) -> str | None:
    """How a call that failed differs from those that went well; None if that is not what the error is about.

    Eager mode takes all numbers alike, and what it raises for one of them says more; so does what stops a capture by
    the names of sizes, which is tried again by numbers.
    """
    if Varying.in_key(call.key) is not None:
        return None
    if isinstance(error, MonographError) and is_named(error):
        return None
    return None if raised_by_user(error) else misfit(call, known, numbers=False)


def about_misfit(error: Exception, call: Call, known: Sequence[Signature], last: str | None) -> Exception:
    """An error of a capture with how the call differs from those that went well: last, since it need not be the cause.

    `last` is the name of the last argument, where those before it go to a model.
    """
    cause = error.__cause__
    if isinstance(error, MonographError) and cause is not None and "positional argument" in str(cause):
        is_users = bool(user_place_of(cause).file)  # the call that does not fit is in code of theirs
        error.hint = error.hint if is_users else _advice(call, last) or error.hint
    if isinstance(error, MonographError) and (
        unfitting := _of_padding(error, call) or _of_specs(error, call)
    ):
        error.hint = unfitting
    fault = misfit_behind(error, call, known)
    return error if fault is None else of_arguments(error, fault)


def of_arguments(error: Exception, fault: str) -> Exception:
    """An error with how the call differs from those that went well: a SignatureError that is of the kind of the error, too."""
    said = f"no call before had such arguments: {fault}"
    if not isinstance(error, MonographError):
        noted = "; ".join([said, *getattr(error, "__notes__", ())])
        return _kind_of_both(type(error))(str(error), where=user_place_of(error), hint=noted)
    error.hint = "; ".join(filter(None, [error.hint, said]))
    error.__class__ = _kind_of_both(type(error))
    return error


_kinds: Final[dict[type[Exception], type[SignatureError]]] = {}  # remembered for each kind of error


def _kind_of_both(kind: type[Exception]) -> type[SignatureError]:
    """The same kind of error that is a SignatureError, too."""
    if kind not in _kinds:
        _kinds[kind] = _made_of_both(kind)
    return _kinds[kind]


def _made_of_both(kind: type[Exception]) -> type[SignatureError]:
    if issubclass(kind, SignatureError):
        return kind
    is_ours = issubclass(kind, MonographError)
    bases = (kind, SignatureError) if is_ours else (SignatureError, kind)
    try:
        made = type(
            kind.__name__ if is_ours else "SignatureError", bases, {"__module__": SignatureError.__module__}
        )
    except TypeError:  # C has made it, and its objects have another layout
        return SignatureError
    copyreg.pickle(made, _reduced)  # it has no name of its own
    return made


def _reduced(error: SignatureError) -> tuple[Any, ...]:
    kind = next(base for base in type(error).__bases__ if base is not SignatureError)
    return _of_both, (_as(kind, error),)


def _of_both(error: Exception) -> Exception:
    return _as(_kind_of_both(type(error)), error)


def _as(kind: type[Any], error: Exception) -> Exception:
    """An error of this kind with the same content."""
    made: Exception = kind.__new__(kind, *error.args)
    made.__dict__.update(error.__dict__)
    return made


def _of_padding(error: MonographError, call: Call) -> str:
    """What to pad, too, where sizes do not fit in a step whose arguments are padded; empty if that is not what failed."""
    _, settings, _ = call.key
    if not (settings.buckets and isinstance(error, CaptureError) and _OF_SIZES.match(error.message)):
        return ""
    padded = {item.argument: f"{item.argument} (dim {item.dim})" for item in settings.buckets}
    masks = [item.mask for item in settings.buckets if item.mask]
    left = [
        f"{path} {tuple(map(int, key.shape))}"
        for path, key in zip(call.paths(), call.keys, strict=True)
        if isinstance(key, TensorKey) and path not in (*padded, *masks)
    ]
    others = (
        f", and these are not: {', '.join(left[:_SHOWN])}{', ...' if len(left) > _SHOWN else ''}"
        if left
        else ""
    )
    return f"config.buckets() pads {', '.join(padded.values())}{others}; what has to fit it needs buckets of the same sizes"


def _of_specs(error: MonographError, call: Call) -> str:
    """What specs say of arguments, where sizes do not fit; empty if that is not what failed."""
    pairs = zip(call.paths(), call.leaves, strict=True)
    specs = [f"{path} {tuple(map(int, leaf.shape))}" for path, leaf in pairs if isinstance(leaf, Spec)]
    if not (specs and isinstance(error, CaptureError) and _OF_SIZES.match(error.message)):
        return ""
    more = ", ..." if len(specs) > _SHOWN else ""
    return (
        f"an mg.spec has all dimensions of the tensor, that of the batch first; the step was captured with {', '.join(specs[:_SHOWN])}{more}, "
        "where each mg.Dim has a size of its range"
    )


def _advice(call: Call, last: str | None) -> str:
    """What to say of a model that got another number of arguments than it takes."""
    args, kwargs = unflatten(call.tree, iter(call.leaves))
    order = (
        f"the last argument is the {last}, and those before it go to the model: step(*inputs, {last})"
        if last
        else ""
    )
    return "; ".join(filter(None, [unpacking(args, kwargs), order]))
