"""A call through the dual torch: eager mode runs it on the real objects, `align` on copies made before.

The graphs are made when the test has gone through in eager mode, so a case that PyTorch refuses costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monograph import CaptureError
from monograph.compat.tensors import version_of
from monograph.testing import timing
from monograph.testing.align import align
from monograph.testing.alignment.arguments import Arguments
from monograph.testing.alignment.copies import copied
from monograph.testing.alignment.report import AlignmentError
from monograph.testing.dual.annotations import types_of
from monograph.testing.dual.case import Case, Options, current_case
from monograph.testing.dual.excluded import EXCLUDED
from monograph.testing.dual.real_values import settled_call
from monograph.testing.dual.shared_memory import share_memory, with_views_inside
from monograph.user_code.lines import user_place

_ONEFLOW_RTOL, _ONEFLOW_ATOL = 1e-4, 1e-5  # where only one of the two is given
_OF_EAGER = "eager mode raised it"  # the note that align() adds to what passes through
_REFUSED_BY_GRAPH = (
    'a graph refuses this call by name; a test for which that is known says check_graph="ValidatedFalse"'
)


@dataclass(frozen=True)
class Callee:
    """What is called: its name in the program (a method's begins with a dot), and the real callable."""

    name: str
    target: Callable[..., Any]
    of: Any = None  # the module that it is, or is a method of
    aligned: bool = True
    is_attribute: bool = False

    @property
    def short_name(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def perform(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call in eager mode, note down what is to be checked in a graph, and give the real result."""
    types = types_of(callee.target, len(args), tuple(kwargs))
    args, kwargs = settled_call(args, kwargs, types)
    kwargs = timing.observe(callee.target, args, kwargs)
    case = current_case()
    if case is None:
        return callee.target(*args, **kwargs)
    text = _text(case, callee, args, kwargs)
    check = _Check(callee, Arguments(args, kwargs), case) if _is_aligned(callee, case.options) else None
    try:
        result = callee.target(*args, **kwargs)
    except Exception as error:
        case.refuse(error)
    if isinstance(result, Iterator):
        result = list(result)  # such as the parameters of a module
    case.program.add_call(text, result)
    if check is not None and check.has_effect(result):
        case.checks.append(check)
    return result


def noted(text: str, owner: Any, found: Any) -> Any:
    """A tensor or a module that an owner holds, with a line in the program that says where it comes from."""
    case = current_case()
    if case is not None and isinstance(found, (torch.Tensor, nn.Module)):
        case.program.add_found(text.format(case.program.expression(owner)), found)
    return found


def _is_aligned(callee: Callee, options: Options) -> bool:
    return (
        callee.aligned and options.check_graph is True and callee.short_name not in (EXCLUDED.keys() - {"to"})
    )


def _text(case: Case, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    program = case.program
    if callee.is_attribute:
        return program.attribute(args[0], callee.short_name)
    return program.call(callee.name, args if callee.of is None else (callee.of, *args), kwargs)


class _Check:
    """What a call was given, copied before it ran."""

    def __init__(self, callee: Callee, given: Arguments, case: Case) -> None:
        self._callee, self._case, self._given = callee, case, given
        self._versions = [version_of(tensor) for tensor in given.tensors()]
        self._copies = given.copied()
        self._place = user_place()
        self._target = copied(callee.target) if isinstance(callee.target, nn.Module) else callee.target
        self._grad = (
            case.options.auto_backward is not False and torch.is_grad_enabled() and self._differentiable()
        )

    def has_effect(self, result: Any) -> bool:
        """True if the call, which was just made, gave a new tensor or changed one that it was given."""
        self._line = self._case.program.num_lines - 1
        tensors = self._given.tensors()
        changed = self._versions != [version_of(tensor) for tensor in tensors]
        found = Arguments((result,), {}).tensors()
        itself = self._callee.short_name == "to" and any(result is tensor for tensor in tensors)
        if changed and share_memory(self._copies) and not isinstance(self._target, nn.Module):
            self._target, pieces = with_views_inside(self._target, self._copies)
            self._copies = Arguments(pieces, {})
        return changed or (bool(found) and not itself)

    def run(self) -> None:
        """Align; a difference is a failure of the test."""
        options = self._case.options
        rtol, atol = _tolerances(options)
        try:
            align(
                self._target,
                *self._copies.args,
                kwargs=self._copies.kwargs,
                modes=options.modes,
                grad=self._grad,
                calls=options.calls,
                seed=self._case.seed,
                rtol=rtol,
                atol=atol,
                check_dtype=options.check_dtype,
            )
        except AlignmentError as error:
            self._case.program.mark(self._line)
            error.add_note(f"the call is at {self._place}")
            if isinstance(error.__cause__, CaptureError):
                error.add_note(_REFUSED_BY_GRAPH)
            raise
        except Exception as error:
            if not any(_OF_EAGER in note for note in getattr(error, "__notes__", ())):
                raise
            self._case.refuse(error)  # the backward is refused, for example

    def _differentiable(self) -> bool:
        """True if eager mode would record a gradient for this call."""
        module = self._callee.target
        held = module.parameters() if isinstance(module, nn.Module) else ()
        return any(tensor.requires_grad for tensor in (*self._given.tensors(), *held))


def _tolerances(options: Options) -> tuple[float | None, float | None]:
    """rtol and atol for `align`; None for both is what the mode promises."""
    if not options.check_allclose:
        return 0.0, torch.finfo(torch.float64).max  # any finite number is near enough
    if options.rtol is None and options.atol is None:
        return None, None
    return (
        _ONEFLOW_RTOL if options.rtol is None else options.rtol,
        _ONEFLOW_ATOL if options.atol is None else options.atol,
    )
