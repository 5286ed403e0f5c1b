"""Sizes of one. They are no sizes of a name, since torch does other things with them, but often the step is the same.

So the step is captured, with numbers for these and names for the other sizes, which may be any later. If it is, op by op,
what a build for all sizes makes, and depends on nothing more, that build serves it from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any

import torch

from monograph.capture.captured import Captured
from monograph.capture.guards.sources.values import same
from monograph.capture.step.request import Request
from monograph.capture.trace import capture
from monograph.compat.modes import outside_of_modes
from monograph.compiler import Build
from monograph.errors import CaptureError
from monograph.ir.call.signature import Call
from monograph.ir.call.varying import ones_in
from monograph.ir.graph_signature import Fixed, Part, Result
from monograph.ir.size_numbers import is_same_at

Candidate = tuple[Call, Build]  # a call by names, and a build that would serve it but for its sizes of one


class Served(Exception):
    """A build for all sizes makes the very step that was captured."""

    def __init__(self, call: Call, build: Build) -> None:
        super().__init__(str(build))
        self._call, self._build = call, build

    def build(self) -> Build:
        """It, which serves such calls from now on."""
        self._build.ones.add(ones_in(self._call))
        return self._build


class NotPermitted(Exception):
    """It is another step, and the configuration allows no build for it."""

    def __init__(self, error: CaptureError) -> None:
        super().__init__(str(error))
        self.error = error


def capture_unless_served(
    candidates: Sequence[Candidate], permit: Callable[[], object], request: Request
) -> Captured:
    """The step, if no candidate makes it. Raises Served if one does, and NotPermitted if `permit` raises before a new build."""
    captured = capture(request)
    try:
        for call, build in candidates:
            if _is_same_step(build, captured, call):
                raise Served(call, build)
        permit()
    except CaptureError as error:
        captured.undo()
        raise NotPermitted(error) from None
    except BaseException:
        captured.undo()
        raise
    return captured


def _is_same_step(build: Build, captured: Captured, call: Call) -> bool:
    known, bound = build.captured, build.executor.bound
    others = captured.effects.found or captured.grown or captured.put_again.places
    if others or captured.writes or captured.changes or not build.changes_tensors_alone:
        return False
    before = known.steps, known.without_gradient, known.hooks, bound.result_tree
    now = captured.steps, captured.without_gradient, captured.hooks, captured.result_tree
    literals = known.literals | captured.literals
    return (
        before == now
        and len(bound.results) == len(captured.results)
        and all(map(_is_same_result, bound.results, captured.results))
        and set(captured.guards.texts()) <= set(build.guards.texts())
        and _are_same_places(bound.sources, captured.sources, literals)
        and _are_same_places(bound.targets, captured.targets, literals)
        and is_same_at(build.stages[0].program, captured.program, dict.fromkeys(ones_in(call), 1))
    )


def _is_same_result(one: Result, other: Result) -> bool:
    forms = [(item.kind, item.index, item.requires_grad) for item in (one, other)]
    return forms[0] == forms[1] and one.live is None is other.live and same(one.value, other.value)


def _are_same_places(ours: Sequence[object], theirs: Sequence[object], literals: Collection[int]) -> bool:
    """True if inputs come from the same objects, or outputs go there. Literals are the same if they are equal."""
    return len(ours) == len(theirs) and all(
        _is_same_place(one, other, literals) for one, other in zip(ours, theirs, strict=True)
    )


def _is_same_place(one: Any, other: Any, literals: Collection[int]) -> bool:
    if type(one) is not type(other) or isinstance(one, Part):
        return False
    if isinstance(one, Fixed) and id(one.value) in literals and id(other.value) in literals:
        return _is_same_literal(one.value, other.value)
    return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))


def _is_same_literal(one: torch.Tensor, other: torch.Tensor) -> bool:
    forms = [(item.dtype, item.device, item.shape, item.stride()) for item in (one, other)]
    if forms[0] != forms[1]:
        return False
    with outside_of_modes():  # bit by bit, since NaNs differ and zeros have signs
        first, second = (item.detach().contiguous().reshape(-1).view(torch.uint8) for item in (one, other))
        return torch.equal(first, second)
