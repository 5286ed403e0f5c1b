"""The whole order of a compilation on one screen: capture -> passes -> plan -> backend."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import torch

from monograph.backends import LoweredProgram, LoweringRequest, TunedKernel, lower
from monograph.capture.captured import Captured
from monograph.capture.guards.guards import Guards
from monograph.capture.guards.weak import objects_of
from monograph.capture.process.signals import Heard, handlers_heard
from monograph.capture.step.request import Request
from monograph.capture.trace import LOGGER, capture
from monograph.compat.tensors import storage_key
from monograph.errors import BackendError, CaptureError
from monograph.ir.call.signature import Call
from monograph.ir.graph_signature import Argument, BoundProgram, Copy, Fixed, HeldGradient, Number
from monograph.ir.meta import TensorMeta, value
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.text import count_text, shortened
from monograph.passes.run import Stage, run_passes
from monograph.passes.table import pipeline
from monograph.plan.check import check_plan
from monograph.plan.plan import Plan, make_plan
from monograph.runtime.executor import Executor
from monograph.runtime.runner import is_promised, resolving
from monograph.settings import Settings
from monograph.state.collector import rare_collections
from monograph.state.frames import in_one_piece
from monograph.state.signals import Hold

_SHOWN: Final = 8  # builds in a cell


@dataclass(frozen=True, eq=False)
class Build:
    """All that one compilation made. Never changed."""

    number: int
    backend: str
    settings: Settings
    reason: str  # why it was made
    stages: tuple[Stage, ...]
    plan: Plan
    executor: Executor
    captured: Captured
    notes: tuple[str, ...] = ()  # what the backend reports
    choices: tuple[TunedKernel, ...] = ()  # kernels, by measurement

    def __repr__(self) -> str:
        ops = count_text(len(list(self.program.ops())), "op")
        return f"<Build {self.number} on {self.backend}, {ops}: {shortened(self.reason)}>"

    def release(self) -> None:
        """Let go of the tensors it is bound to: they are no longer the state, and it will not run again."""
        self.executor.release()
        self.guards.release()

    def held(self) -> Iterator[Any]:
        """Tensors, and objects that it changes, which it keeps alive."""
        yield from self.executor.bound.held_tensors
        for effect in self.captured.effects.found:
            yield from objects_of(effect.source).values()

    def bind_anew(self) -> str | None:
        """Bind it to state that has taken the place of other state of the same form.

        If that cannot be, or if something else has changed, nothing is done, and a sentence says what.
        """
        swap = self.guards.replaced(self.executor.given())
        if isinstance(swap, str):
            return swap
        if not swap.old:
            return "no state was replaced"
        if self.captured.effects.found or self.captured.grown:
            return "state was replaced, and the step changes objects of Python besides"
        self.executor.bind_anew(swap)
        self.guards.bind(swap)
        return None

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.stages[-1].program

    @cached_property
    def guards(self) -> Guards:
        """What must hold for it to serve a call."""
        return self.captured.guards

    def fits(self, call: Call) -> bool:
        """True if it can serve a call: all guards hold, and Python would take the same branches."""
        if not self.guards.hold_for(call) or not self.takes_branches(call.leaves):
            return False
        self.guards.note_flat(call, self.executor.bound.sources)
        return True

    @property
    def changes_tensors_alone(self) -> bool:
        """True if a step changes nothing in Python objects, and nothing but values in its arguments."""
        captured, bound = self.captured, self.executor.bound
        effects = captured.effects.found or captured.grown or captured.put_again.places
        return not (effects or bound.writes or bound.changes)

    def takes_branches(self, leaves: Sequence[Any]) -> bool:
        """True if Python would take the branches of the capture with these arguments, and the numbers of now."""
        return self.guards.conditions_hold(self.executor.bind(leaves))

    def differs(self, call: Call) -> str | None:
        """Why it cannot serve a call, as a sentence; None if values at most are other objects that are equal."""
        try:
            inputs = self.executor.bind(call.leaves)
        except LookupError:
            return "a number that the step reads is gone: of a param group, or of optimizer state"
        return self.guards.reason(inputs, call)


class Builds(tuple[Build, ...]):
    """The builds of a graph, oldest first."""

    __slots__ = ()

    def __repr__(self) -> str:
        if len(self) < 2:
            return tuple.__repr__(self)
        left_out = len(self) - _SHOWN
        middle = [f" ... {count_text(left_out, 'build')} in between"] if left_out > 0 else []
        lines = [f" {build!r}," for build in self]
        first = lines if left_out <= 0 else lines[: _SHOWN // 2]
        return "\n".join(["(", *first, *middle, *lines[len(first) + max(left_out, 0) :], ")"])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@in_one_piece
def compile_step(
    request: Request,
    *,
    reason: str,
    number: int,
    hold: Hold,
    capture_by: Callable[[Request], Captured] = capture,
) -> Build:
    """Capture a step and make it run: on the backend that is asked for, or on aten where that cannot be.

    With the return signals wait by `hold`, so that what the capture has left in the state stays with its build.
    """
    captured: Captured | None = None
    with handlers_heard() as heard, rare_collections():
        try:
            start = time.perf_counter()
            with request.observer.stage("capture"):
                captured = capture_by(request)
            if captured.guards.are_loose:
                gc.collect()  # a trace is in cycles: what it met lives no longer for its sake
            first = Stage("capture", captured.program, time.perf_counter() - start)
            build = _runnable(request, captured, first, reason, number, heard)
            _check_branches(captured.guards, build.executor.bind(request.call.leaves), request.call)
            heard.check()
            build = replace(build, captured=captured.unbound())
            hold.on = True
            return build
        except BaseException:
            hold.on = True
            if captured is not None:
                captured.undo()
            raise


def _runnable(
    request: Request, captured: Captured, first: Stage, reason: str, number: int, heard: Heard
) -> Build:
    """A build of what was captured. Where no other backend can be used, the same capture is lowered for aten."""
    settings = request.settings
    try:
        return _lowered(request, captured, first, settings, reason, number)
    except BackendError as error:
        heard.check()
        if not settings.is_compiled:
            raise
        LOGGER.warning("%s: %s; the step runs on the aten backend", request.name, error)
        note = f"{settings.backend} could not be used: {error.message}"
    return replace(_lowered(request, captured, first, settings.plain(), reason, number), notes=(note,))


def _lowered(
    request: Request, captured: Captured, first: Stage, settings: Settings, reason: str, number: int
) -> Build:
    stage, leaves = request.observer.stage, request.call.leaves
    with stage("passes"):
        stages = run_passes(first, pipeline(settings))
    with stage("plan"):
        plan = make_plan(stages[-1].program)
        check_plan(plan)
    shared = captured.guards.shared_with_arguments
    with stage(f"backend {settings.backend}"):
        report = request.observer.progress
        made = make_runnable(captured.for_good(), plan, settings, leaves, shared=shared, report=report)
    lowered = made.lowered
    captured.guards.look_at_pointers_by(lowered.pointer_guard)
    if settings.is_compiled:
        captured.guards.depend_on(captured.unraised)
    return Build(
        number,
        lowered.backend,
        settings,
        reason,
        stages + lowered.stages,
        plan,
        made.executor,
        captured,
        lowered.notes,
        lowered.choices,
    )


@dataclass(frozen=True)
class Runnable:
    """A bound program that a backend runs."""

    lowered: LoweredProgram
    executor: Executor


def make_runnable(
    bound: BoundProgram,
    plan: Plan,
    settings: Settings,
    leaves: Sequence[Any],
    *,
    shared: Collection[int] = (),
    report: Callable[[str], object] = str,
) -> Runnable:
    """Lower a plan, that of the bound program after its passes. `leaves` are those of a first call.

    `shared` are storages of state that the arguments of a call share; `report` gets how far it is.
    """
    inputs = partial(_copied_inputs, bound, leaves)
    promised = _promised(bound, leaves)
    waits = not settings.is_compiled and any(
        write.moves and not write.value.is_known for write in bound.writes
    )
    in_place = _in_place(bound, plan, shared) if not waits else frozenset()  # such a number may yet fail
    lowered = lower(LoweringRequest(plan, settings, in_place, inputs, report))
    runner = resolving(lowered.runner, promised) if settings.is_compiled else lowered.runner
    return Runnable(lowered, Executor(bound, runner, plan.program))


def _promised(bound: BoundProgram, leaves: Sequence[Any]) -> frozenset[int]:
    """The inputs that are conjugated or negated by a bit alone, of which compiled code knows nothing, or may be."""
    found = set()
    for position, source in enumerate(bound.sources):
        match source:
            case Fixed(torch.Tensor() as tensor):
                promised = is_promised(tensor)
            case Argument(index):
                promised = isinstance(leaves[index], torch.Tensor) and is_promised(leaves[index])
            case _:
                promised = isinstance(source, HeldGradient)
        if promised:
            found.add(position)
    return frozenset(found)


def _copied_inputs(bound: BoundProgram, leaves: Sequence[Any]) -> list[Any]:
    """The program's inputs as they are now, in memory of their own; zeros where there is only a description."""
    found: list[Any] = []
    nodes = bound.program.graph.find_nodes(op="placeholder")
    for source, node in zip(bound.sources, nodes, strict=True):
        match source:
            case Fixed(item):
                given = item
            case Argument(index):
                given = leaves[index]
            case HeldGradient(parameter):
                given = parameter.grad
            case Number():
                given = source.read()
        described = value(node)
        if isinstance(given, torch.Tensor):
            given = torch.empty_strided(
                given.shape, given.stride(), dtype=given.dtype, device=given.device
            ).copy_(given.detach())
        elif isinstance(described, TensorMeta):
            given = torch.zeros(described.shape, dtype=described.dtype, device=described.device)
        found.append(given)
    return found


def _in_place(bound: BoundProgram, plan: Plan, shared: Collection[int]) -> frozenset[int]:
    """The outputs that may be written into the memory of the state they replace: no other input is there."""
    tensors = [source.value for source in bound.sources if isinstance(source, Fixed)]
    storages = Counter(storage_key(item) for item in tensors if isinstance(item, torch.Tensor))
    storages.update(shared)
    inputs = {
        port.path: source.value
        for port, source in zip(bound.program.inputs, bound.sources, strict=True)
        if isinstance(source, Fixed)
    }
    first = sum(port.role is Role.USER for port in bound.program.outputs)
    return frozenset(
        position
        for position, target in enumerate(bound.targets, first)
        if isinstance(target, Copy)
        and position in plan.in_place
        and inputs.get(bound.program.outputs[position].path) is target.tensor
        and storages[storage_key(target.tensor)] == 1
        and not is_promised(target.tensor)
    )


def _check_branches(guards: Guards, inputs: Sequence[Any], call: Call) -> None:
    """The branches that the trace took must be those that this very step takes."""
    if not guards.conditions_hold(inputs):
        raise CaptureError(
            f"the capture took a branch that this step does not take: {guards.reason(inputs, call)}",
            hint="the optimizer counts in a way that a capture cannot follow; run it eagerly",
        )
