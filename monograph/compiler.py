"""The whole order of a compilation on one screen: capture -> passes -> plan -> backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monograph.backends import LOWER
from monograph.capture.guards import Guards
from monograph.capture.signature import Call
from monograph.capture.step import Request
from monograph.capture.trace import Captured, capture
from monograph.errors import CaptureError
from monograph.ir.program import Program
from monograph.passes import Stage, pipeline, run_passes
from monograph.plan.check import check_plan
from monograph.plan.plan import Plan, make_plan
from monograph.runtime.executor import Executor


@dataclass(frozen=True, eq=False)
class Build:
    """All that one compilation made. Never changed."""

    number: int
    backend: str
    reason: str  # why it was made
    stages: tuple[Stage, ...]
    plan: Plan
    executor: Executor
    captured: Captured

    def release(self) -> None:
        """Let go of the tensors it is bound to: they are no longer the state, and it will not run again."""
        self.executor.release()
        self.guards.release()

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.stages[-1].program

    @property
    def guards(self) -> Guards:
        """The facts that it stands on."""
        return self.captured.guards


def compile_step(
    request: Request, *, reason: str, number: int, capture_by: Callable[[Request], Captured] = capture
) -> Build:
    """Capture a step and make it run."""
    start = time.perf_counter()
    captured = capture_by(request)
    try:
        first = Stage("capture", captured.program, time.perf_counter() - start)
        stages = run_passes(first, pipeline(request.settings))
        plan = make_plan(stages[-1].program)
        check_plan(plan)
        runner = LOWER[request.settings.backend](plan)
        executor = Executor(captured, runner)
        _check_branches(captured.guards, executor.bind(request.call.leaves), request.call)
    except BaseException:
        captured.undo()
        raise
    return Build(number, request.settings.backend, reason, stages, plan, executor, captured.unbound())


def _check_branches(guards: Guards, inputs: Sequence[Any], call: Call) -> None:
    """The branches that the trace took must be those that this very step takes."""
    if not guards.conditions_hold(inputs):
        raise CaptureError(
            f"the capture took a branch that this step does not take: {guards.reason(inputs, call)}",
            hint="the optimizer counts in a way that a capture cannot follow; run it eagerly",
        )
