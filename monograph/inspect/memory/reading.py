"""The memory of a step as its build knows it, at the sizes of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from monograph.backends.aten import plan_to_run
from monograph.compiler import Build
from monograph.inspect.memory.devices import peaks_by_device
from monograph.inspect.memory.holders import holders
from monograph.inspect.memory.kernels import kernel_bytes
from monograph.inspect.memory.point import Point
from monograph.inspect.memory.report import MemoryReport, PassMemory
from monograph.ir.meta import TensorMeta, origin, value
from monograph.ir.program import Program
from monograph.ir.size_numbers import with_sizes_given
from monograph.ir.text import Rows
from monograph.plan.memory import MemoryPlan, Moment
from monograph.plan.plan import Plan, make_plan
from monograph.recompute.recompute import share_text
from monograph.runnable import PLANNED_ONLY
from monograph.settings import PLAIN
from monograph.sizes.place import size_places
from monograph.state.collector import rare_collections
from monograph.user_code.lines import Origin

_NOWHERE = Origin()


def memory_report(graph: str, build: Build, inputs: Sequence[Any] | None = None) -> MemoryReport:
    """What a step of this build holds: with the sizes of these inputs of its program, by default with those of its capture."""
    with rare_collections():  # plans are many small objects, in no cycles
        return _report(graph, build, inputs)


def _report(graph: str, build: Build, inputs: Sequence[Any] | None) -> MemoryReport:
    sizes = {} if inputs is None else _other_sizes(build.plan.program, inputs)
    plan, memory, notes = build.compiled_plan or build.plan, build.memory, list[str]()
    notes += [note for note in build.notes if note == PLANNED_ONLY]
    budget = build.settings.memory_budget
    if budget is not None and budget.share and build.plan.limit is not None and not sizes:
        whole = round(build.plan.limit / budget.share)
        notes.append(f"of what the step makes, its budget {share_text(budget, whole)}")
    if sizes:
        planned = make_plan(with_sizes_given(build.plan.program, sizes))
        plan = plan_to_run(replace(build.order(), plan=planned, settings=build.settings.plain()))
        memory = plan.memory
        if build.backend != PLAIN:
            notes.append("at these sizes as planned: the compiled code is known at those of its capture")
    places = _origins(plan)
    return MemoryReport(
        graph=graph,
        backend=build.backend,
        peak_bytes=memory.peak_bytes,
        state_bytes=memory.state_bytes,
        argument_bytes=memory.argument_bytes,
        by_device=_by_device(plan, memory),
        peak=_peak(memory, places),
        timeline=Rows(_point(moment, places) for moment in memory.timeline),
        holders=Rows(holders(plan, memory)),
        passes=Rows(_passes(build, memory, sizes)),
        notes=tuple(notes),
        kernel_bytes=0 if build.settings.is_compiled else kernel_bytes(plan.program, memory),
    )


def _other_sizes(program: Program, inputs: Sequence[Any]) -> Mapping[str, int]:
    """The sizes that vary as these inputs have them; empty if they are those of the capture."""
    described = map(value, program.graph.find_nodes(op="placeholder"))
    shapes = [item.shape if isinstance(item, TensorMeta) else () for item in described]
    places = size_places(shapes)
    found = {name: inputs[at.position].shape[at.dim] // at.parts for name, at in places.items()}
    known = {name: int(shapes[at.position][at.dim]) // at.parts for name, at in places.items()}
    return found if found != known else {}


def _by_device(plan: Plan, memory: MemoryPlan) -> Mapping[str, int]:
    """By the plan; of compiled code that holds other bytes those are where most are."""
    planned = dict(peaks_by_device(plan))
    for device in list(planned)[:1]:
        planned[device] += memory.peak_bytes - plan.memory.peak_bytes
    return planned


def _origins(plan: Plan) -> Mapping[str, Origin]:
    return {node.name: origin(node) for node in plan.program.graph.nodes}


def _point(moment: Moment, places: Mapping[str, Origin]) -> Point:
    where = places.get(moment.node, _NOWHERE)
    return Point(moment.node, where, moment.running_bytes, moment.left_bytes)


def _peak(memory: MemoryPlan, places: Mapping[str, Origin]) -> Point:
    found = (moment for moment in memory.timeline if moment.node == memory.peak_node)
    return _point(next(found, Moment("", 0, 0)), places)


def _passes(build: Build, memory: MemoryPlan, sizes: Mapping[str, int]) -> Iterator[PassMemory]:
    """The peak after each stage up to the plan, and with the compiled code, if that holds other bytes."""
    planned = [stage.program is build.plan.program for stage in build.stages].index(True)
    stages = build.stages[: planned + 1]
    peak = _peak_bytes(stages[0].program, sizes)
    yield PassMemory(stages[0].name, peak, 0)
    for before, after in pairwise(stages):
        earlier = peak
        if after.program is build.plan.program and not sizes:
            peak = build.plan.memory.peak_bytes  # known already
        elif after.program is not before.program:
            peak = _peak_bytes(after.program, sizes)
        yield PassMemory(after.name, peak, earlier - peak)
    if memory.peak_bytes != peak:
        yield PassMemory(build.backend, memory.peak_bytes, peak - memory.peak_bytes)


def _peak_bytes(program: Program, sizes: Mapping[str, int]) -> int:
    return make_plan(with_sizes_given(program, sizes) if sizes else program).memory.peak_bytes
