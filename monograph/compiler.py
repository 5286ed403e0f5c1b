"""The whole order of a compilation on one screen: capture -> passes -> plan -> backend."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final

from monograph.backends import LoweredProgram, LoweringRequest, TunedKernel
from monograph.capture.captured import Captured
from monograph.capture.guards.guards import Guards
from monograph.capture.guards.weak import objects_of
from monograph.capture.process.signals import Heard, handlers_heard
from monograph.capture.step.request import Request
from monograph.capture.trace import LOGGER, capture
from monograph.distributed.programs.collectives import begins_collective
from monograph.errors import BackendError, CaptureError, PlanError
from monograph.ir.call.reason import Cause, Reason, joined
from monograph.ir.call.signature import Call
from monograph.ir.call.varying import ones_in
from monograph.ir.program import Program
from monograph.ir.text import Displayed, bytes_text, count_text, shortened
from monograph.passes.run import Stage, run_passes
from monograph.passes.table import pipeline
from monograph.plan.check import check_plan
from monograph.plan.memory import MemoryPlan
from monograph.plan.plan import Plan, make_plan
from monograph.recompute.recompute import limit_of, recompute_passes
from monograph.runnable import make_runnable, order_of
from monograph.runtime.executor import Executor
from monograph.settings import Settings
from monograph.state.collector import rare_collections
from monograph.state.frames import in_one_piece
from monograph.state.signals import Hold, held_back

_SHOWN: Final = 8  # builds in a cell


@dataclass(frozen=True, eq=False)
class Build(Displayed):
    """All that one compilation made. Never changed, but that `ones` grows."""

    number: int
    backend: str
    settings: Settings
    reason: Reason  # why it was made
    stages: tuple[Stage, ...]
    plan: Plan
    executor: Executor
    captured: Captured
    notes: tuple[str, ...] = ()  # what the backend reports
    choices: tuple[TunedKernel, ...] = ()  # kernels, by measurement
    seconds: float = 0.0  # that making it has taken
    compiled_memory: MemoryPlan | None = None  # of code that holds other bytes than the plan
    compiled_plan: Plan | None = None  # of code that follows another plan, which says so
    ones: set[frozenset[str]] = field(default_factory=set)  # sizes that vary which may be 1, found later

    def __repr__(self) -> str:
        ops = count_text(len(list(self.program.ops())), "op")
        return f"<Build {self.number} on {self.backend}, {ops}: {shortened(self.reason)}>"

    def __str__(self) -> str:
        steps, most = count_text(self.executor.steps, "step"), bytes_text(self.memory.peak_bytes)
        stages = ", ".join(f"{stage.name} {len(list(stage.program.ops()))}" for stage in self.stages)
        return "\n".join([
            f"build {self.number} on {self.backend}: {self.reason}",
            f"  {steps}, made in {self.seconds:.2f} s; a step makes at most {most} besides state and arguments",
            f"  ops after each stage: {stages}",
            *(f"  {note}" for note in self.notes),
        ])  # fmt: skip

    def release(self) -> None:
        """Let go of the tensors it is bound to: they are no longer the state, and it will not run again."""
        self.executor.release()
        self.guards.release()

    def held(self) -> Iterator[Any]:
        """Tensors, and objects that it changes, which it keeps alive."""
        yield from self.executor.bound.held_tensors
        for effect in self.captured.effects.found:
            yield from objects_of(effect.source).values()

    def order(self, settings: Settings | None = None) -> LoweringRequest:
        """What a backend gets to lower the step again, for other settings too."""
        plan = self.plan if settings is None else planned(self.stages[0], settings)[1]
        shared = self.captured.guards.shared_with_arguments
        return order_of(self.executor.bound, plan, settings or self.settings, shared=shared)

    def by(self, lowered: LoweredProgram) -> Build:
        """The same plan by other code, which computes the same bits."""
        executor = Executor(self.executor.bound, lowered.runner, self.plan.program)
        executor.has_run, executor.steps = self.executor.has_run, self.executor.steps
        _rely_on(self.captured.guards, lowered, self.plan)
        return replace(
            self,
            backend=lowered.backend,
            stages=self.stages + lowered.stages,
            executor=executor,
            notes=self.notes + lowered.notes,
            compiled_memory=lowered.memory,
            compiled_plan=lowered.plan,
        )

    def lowered_again(self, settings: Settings, leaves: Sequence[Any]) -> Build:
        """The step lowered for other settings, to go on with these arguments. Raises BackendError if that cannot be."""
        start = time.perf_counter()
        stages, plan = planned(self.stages[0], settings)
        guards = self.captured.guards
        made = make_runnable(self.executor.bound, plan, settings, leaves, shared=guards.shared_with_arguments)
        _rely_on(guards, made.lowered, plan)
        made.executor.steps = self.executor.steps
        return replace(
            self,
            backend=made.lowered.backend,
            stages=stages + made.lowered.stages,
            plan=plan,
            executor=made.executor,
            notes=made.lowered.notes,
            choices=made.lowered.choices,
            compiled_memory=made.lowered.memory,
            compiled_plan=made.lowered.plan,
            seconds=self.seconds + time.perf_counter() - start,
        )

    def bind_anew(self) -> str | None:
        """Bind it to state that has taken the place of other state of the same form.

        If that cannot be, or if something else has changed, nothing is done, and a sentence says what.
        """
        swap = self.guards.replaced(self.executor.given())
        if isinstance(swap, str):
            return swap
        if not swap.old:
            return "no state was replaced"
        left = chain(self.captured.effects.found, self.captured.grown)
        if any(id(item) in swap.new for effect in left for item in effect.objects()):
            return "state was replaced that the step leaves in objects of Python, too"
        with held_back():  # what it looks at is what it writes
            self.executor.bind_anew(swap)
            self.guards.bind(swap)
        return None

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.stages[-1].program

    @property
    def memory(self) -> MemoryPlan:
        """The bytes that a step holds, op by op."""
        return self.plan.memory if self.compiled_memory is None else self.compiled_memory

    @cached_property
    def communicates(self) -> bool:
        """True if it is a part of a step that several processes take together."""
        return any(map(begins_collective, self.stages[0].program.ops()))

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

    def takes_ones(self, call: Call) -> bool:
        """True if it serves the sizes of one in a call that is known by names."""
        ones = ones_in(call)
        return not ones or ones in self.ones

    @property
    def changes_tensors_alone(self) -> bool:
        """True if a step changes nothing in Python objects, and nothing but values in its arguments."""
        captured, bound = self.captured, self.executor.bound
        effects = captured.effects.found or captured.grown or captured.put_again.places
        return not (effects or bound.writes or bound.changes)

    def takes_branches(self, leaves: Sequence[Any]) -> bool:
        """True if Python would take the branches of the capture with these arguments, and the numbers of now.

        A number that is gone decides nothing: `differences` says so.
        """
        try:
            inputs = self.executor.bind(leaves)
        except LookupError:
            return False
        return self.guards.conditions_hold(inputs)

    def differences(self, call: Call) -> Iterator[Reason]:
        """Why it cannot serve a call, as sentences; none if values at most are other objects that are equal."""
        try:
            inputs = self.executor.bind(call.leaves)
        except LookupError:
            text = "a number that the step reads is gone: of a param group, or of optimizer state"
            yield Reason(text, Cause.HYPERPARAMETER)
            return
        yield from self.guards.reasons(inputs, call)


class Builds(Displayed, tuple[Build, ...]):
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

    def __str__(self) -> str:
        return repr(self)


@in_one_piece
def compile_step(
    request: Request,
    *,
    reason: Reason,
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
            build = replace(build, captured=captured.unbound(), seconds=time.perf_counter() - start)
            hold.on = True
            return build
        except BaseException:
            hold.on = True
            if captured is not None:
                captured.undo()
            raise


def _runnable(
    request: Request, captured: Captured, first: Stage, reason: Reason, number: int, heard: Heard
) -> Build:
    """A build of what was captured. Where no other backend can be used, the same capture is lowered for aten."""
    settings = request.settings
    if settings.begins_plain:
        captured.guards.depend_on(captured.unraised)
        return replace(
            _lowered(request, captured, first, settings.plain(), reason, number), settings=settings
        )
    try:
        return _lowered(request, captured, first, settings, reason, number)
    except (BackendError, PlanError) as error:
        heard.check()
        may_hold_less = isinstance(error, BackendError) or settings.memory_budget is not None
        if settings == settings.plain() or not may_hold_less:
            raise
        why = error
    build = _lowered(request, captured, first, settings.plain(), reason, number)
    LOGGER.warning("%s: %s; the step runs on the aten backend", request.name, why)
    return replace(build, notes=(f"{settings.backend} could not be used: {why.message}",))


def _lowered(
    request: Request, captured: Captured, first: Stage, settings: Settings, reason: Reason, number: int
) -> Build:
    stage, leaves = request.observer.stage, request.call.leaves
    stages, plan = planned(first, settings, stage)
    shared = captured.guards.shared_with_arguments
    with stage(f"backend {settings.first_backend}"):
        report = request.observer.progress
        made = make_runnable(captured.for_good(), plan, settings, leaves, shared=shared, report=report)
    lowered = made.lowered
    if settings.is_compiled:
        captured.guards.depend_on(captured.unraised)
    _rely_on(captured.guards, lowered, plan)
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
        compiled_memory=lowered.memory,
        compiled_plan=lowered.plan,
    )


def _rely_on(guards: Guards, lowered: LoweredProgram, plan: Plan) -> None:
    """Check what the code needs before each step."""
    guards.look_at_pointers_by(lowered.pointer_guard)
    if lowered.assumed.conditions:
        paths = [port.path for port in plan.program.inputs]
        guards.depend_on(
            guards.conditions.and_also(lowered.assumed.conditions, lowered.assumed.places, paths)
        )


def planned(
    first: Stage,
    settings: Settings,
    stage: Callable[[str], AbstractContextManager[None]] = lambda _name: nullcontext(),
) -> tuple[tuple[Stage, ...], Plan]:
    """What was captured after its passes, and its plan."""
    limit: int | None = None
    with stage("passes"):
        last = recompute_passes(first.program, settings)
        stages = run_passes(first, pipeline(settings) + last)
        if last:
            limit = limit_of(stages[-2].program, settings)
        if last and stages[-1].program is stages[-2].program:
            stages = stages[:-1]  # there was nothing to compute again
    with stage("plan"):
        plan = replace(make_plan(stages[-1].program), limit=limit)
        check_plan(plan)
    return stages, plan


def _check_branches(guards: Guards, inputs: Sequence[Any], call: Call) -> None:
    """The branches that the trace took must be those that this very step takes."""
    if not guards.conditions_hold(inputs):
        raise CaptureError(
            f"the capture took a branch that this step does not take: {joined(guards.reasons(inputs, call))}",
            hint="the optimizer counts in a way that a capture cannot follow; run it eagerly",
        )
