"""Functions of torch that look at values and raise: what they look for becomes an op of the program, which raises.

Each row takes the fake mode, the function and its arguments, and gives its result.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch

from monograph.capture.numbers.known import known_value
from monograph.compat.fake_values import checks_as_assertions
from monograph.compat.modes import current_tracer
from monograph.compat.ops import assertions_for_any, only_fault, record_assertion
from monograph.compat.tensors import is_transformed

_DISTRIBUTION = os.path.join("torch", "distributions", "distribution.py")


def all_true(_mode: Any, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """torch.distributions checks its arguments so: the check becomes an op of the program.

    It is `all()`, since torch's fake kernel of the function itself fails where a size varies.
    """
    record_assertion(args[0].all(), _said_by_distribution(sys._getframe(1)), ValueError)
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


def with_checks(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def one_hot(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Eager mode looks whether there are such classes, which C++ of torch leaves out in a trace."""
    made = func(*args, **kwargs)
    classes = args[0] if args else kwargs["input"]
    if not is_transformed(classes):  # nor does eager mode look at these
        record_assertion((classes >= 0).all(), "Class values must be non-negative.")
        record_assertion((classes < made.shape[-1]).all(), "Class values must be smaller than num_classes.")
    return made


def quantile(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Eager mode looks whether there are such quantiles, on a CPU; C++ of torch leaves it out in a trace."""
    q = args[1] if len(args) > 1 else kwargs.get("q")
    if isinstance(q, torch.Tensor) and q.device.type == "cpu" and not is_transformed(q):
        inside = (q >= 0).logical_and(q <= 1).all()
        record_assertion(inside, "quantile() q values must be in the range [0, 1]")
    return func(*args, **kwargs)


def covariance(mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Weights may be negative or leave no degree of freedom, where eager raises or warns: the program raises."""
    tracer = current_tracer()
    with checks_as_assertions(mode, tracer, lambda tensor: known_value(tensor, tracer) is not None):
        return func(*args, **kwargs)


def least_squares(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A matrix may have less than full rank, and then no residuals: a view that does not fit them raises."""
    solution, residuals, *rest = solved = func(*args, **kwargs)
    return type(solved)((solution, residuals.view(residuals.shape), *rest))
