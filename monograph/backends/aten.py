"""The `aten` backend: the program op by op, as generated Python. The oracle: always works, bitwise eager.

New state is computed where the old one is as far as ops cannot fail there: see `monograph/plan/updates/tail.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from monograph.backends.lowering import LoweredProgram, LoweringRequest, kept_for
from monograph.backends.python.generated import generated
from monograph.backends.python.two_parts import in_two_parts
from monograph.kernels.select import select_kernels
from monograph.kernels.tuned import TunedKernel
from monograph.passes.inductor.foreach_to_single import single_on_cpus
from monograph.passes.inductor.fused_in_groups import fused_in_groups
from monograph.passes.inductor.inline_parts import inline_single_calls
from monograph.passes.inductor.loss_in_blocks import loss_in_blocks
from monograph.passes.run import Stage
from monograph.plan.check import check_plan
from monograph.plan.memory import MemoryPlan
from monograph.plan.plan import Plan, make_plan, over_arguments
from monograph.plan.updates.schedule import Schedule, schedule
from monograph.plan.updates.tail import tail_of
from monograph.runtime.runner import Runner

_FUSED = 1 << 20  # bytes of gradients that a fused update waits for
_LARGE = 1 << 20  # bytes; the C library keeps less than that by itself


def lower(
    order: LoweringRequest, parts: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> LoweredProgram:
    """The plan as generated Python; with other kernels only where the settings ask for them.

    `parts` has compiled functions for subgraphs, by name.
    """
    plan, stages, choices = program_to_run(order)
    scheduled = _scheduled(order, plan)
    run = _without_updates(plan) if scheduled is None else scheduled.plan
    runner = (
        Runner(generated(run, parts=parts)) if scheduled is None else in_two_parts(scheduled, parts=parts)
    )
    notes = memory_notes(run.memory, plan)
    return LoweredProgram("aten", runner, stages, notes, choices, memory=run.memory, plan=run)


def plan_to_run(order: LoweringRequest) -> Plan:
    """The plan that `lower` makes run: with its updates in place, if there are some."""
    plan, _, _ = program_to_run(order)
    scheduled = _scheduled(order, plan)
    return _without_updates(plan) if scheduled is None else scheduled.plan


def _without_updates(plan: Plan) -> Plan:
    """A plan that updates no state in place as it runs."""
    run = over_arguments(in_single_ops(plan))
    if run is not plan:
        check_plan(run)
    return run


def program_to_run(
    order: LoweringRequest,
) -> tuple[Plan, tuple[Stage, ...], tuple[TunedKernel, ...]]:
    """The plan, or one with the kernels that are fastest here if the settings ask for them; the stage, and what was chosen."""
    if order.settings.is_compiled or not order.settings.kernel_selection:
        return order.plan, (), ()
    kernels, choices = select_kernels(Stage("plan", order.plan.program, 0.0), order.settings)
    return make_plan(kernels.program), (kernels,), choices


def memory_notes(memory: MemoryPlan, plan: Plan) -> tuple[str, ...]:
    """Keep what a large step frees for the next one, and say so."""
    return kept_for(plan, memory) if memory.peak_bytes >= _LARGE else ()


def _scheduled(order: LoweringRequest, plan: Plan) -> Schedule | None:
    """The plan with its updates in place; None if there are none."""
    single = in_single_ops(plan)
    if order.updates_at_once:
        program = fused_in_groups(single.program, _FUSED if order.chunk_bytes is None else order.chunk_bytes)
        single = single if program is single.program else make_plan(program)
    tail = tail_of(single, order.in_place)
    if tail is None:
        return None
    made = schedule(single, tail, at_once=order.updates_at_once, chunk_bytes=order.chunk_bytes)
    check_plan(made.plan)
    return made


def in_single_ops(plan: Plan) -> Plan:
    """The same without parts that are called once, and without ops on lists: on CPUs these are loops over single ops.

    The gradients of logits are there once, not twice.
    """
    program = loss_in_blocks(single_on_cpus(inline_single_calls(plan.program)))
    return plan if program is plan.program else make_plan(program)
