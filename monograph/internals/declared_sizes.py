"""Sizes that a user has declared to vary: a call has them, and the step fixes none of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from monograph.capture.captured import Captured
from monograph.capture.step.request import Request
from monograph.capture.trace import capture
from monograph.compiler import Build
from monograph.errors import CaptureError, ConfigError
from monograph.ir.call.parameters import is_part_of
from monograph.ir.call.reason import Reason
from monograph.ir.call.signature import Call, TensorKey
from monograph.ir.call.varying import Varying, by_numbers, declared, tied_to_names
from monograph.settings import DynamicSize
from monograph.user_code.lines import makes_text


class FixedSizeError(CaptureError):
    """A declared size that the step fixes."""


def check_declared(call: Call, sizes: Iterable[DynamicSize]) -> None:
    """Raise ConfigError for a declared size that no argument of this call has."""
    paths = call.paths()
    for size in sizes:
        known = [key for path, key in zip(paths, call.keys, strict=True) if is_part_of(path, size.argument)]
        if not known:
            raise ConfigError(
                f"dynamic({size.argument!r}, {size.dim}): build() was given no such argument",
                hint=f"its arguments are {', '.join(paths)}",
            )
        ranks = [len(key.shape) for key in known if isinstance(key, TensorKey)]
        if not any(-rank <= size.dim < rank for rank in ranks):
            what = f"has {max(ranks)} dimensions" if ranks else "is no tensor"
            raise ConfigError(
                f"dynamic({size.argument!r}, {size.dim}): argument {size.argument} {what}",
                hint="dimensions are counted from 0, or from -1 backwards",
            )


def make_by_names(
    make: Callable[..., Build], call: Call, reason: Reason, sizes: Collection[DynamicSize]
) -> Build:
    """A new build for a call by names, by `make` with a call, a reason and what captures the step. `sizes` were declared.

    If the step takes a declared size to be that of another argument, as of labels beside tokens, this one varies with it.
    """
    if not sizes:
        return make(call, reason)
    capture_declared = partial(_capture_declared, sizes)
    try:
        return make(call, reason, capture_declared)
    except FixedSizeError as error:
        if (tied := tied_to_names(call)) is None:
            raise
        fixed = error
    try:
        return make(tied, reason, capture_declared)
    except FixedSizeError:
        raise fixed from None


def _capture_declared(sizes: Iterable[DynamicSize], request: Request) -> Captured:
    """A step for all sizes with a name. Raises FixedSizeError, with the user's line, where it fixes one that was declared."""
    captured = capture(request)
    form, own = Varying.in_key(request.call.key), declared(by_numbers(request.call), sizes)
    theirs = {name for row in own.names for name in row} if own is not None else set()
    for name, where in captured.fixed.items():
        if name not in theirs:
            continue
        ((leaf, dim), *_) = form.places({name}) if form is not None else ((0, 0),)
        captured.undo()
        raise FixedSizeError(
            f"the step fixes size {dim} of argument {request.call.paths()[leaf]}, which was declared to vary",
            where=where,
            hint="make a text of the size after the call, or leave it out"
            if makes_text(where)
            else "compute with the size and keep it out of branches, Python numbers and keys (of tables by length make one of the "
            "largest, and cut it), or do not declare it",
        )
    return captured
