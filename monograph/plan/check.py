"""A checker that knows nothing of how plans are made: it has one acted out, and compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from monograph.errors import PlanError
from monograph.ir.meta import TensorMeta, output_nodes, value
from monograph.ir.port import Role
from monograph.ir.text import bytes_texts
from monograph.plan.evaluate import Probe
from monograph.plan.plan import Plan
from monograph.plan.simulate import Block, Simulation, View


def check_plan(plan: Plan) -> None:
    """Raise PlanError at what would go wrong in a run of this plan.

    That is: a read after a free, a double free, a read of memory that new state was written into meanwhile, new
    state that does not fit where it is written or that the caller sees elsewhere, and more bytes than are planned.
    """
    _check(plan, Probe())


def _check(plan: Plan, probe: Probe) -> Simulation:
    parts = {part.program.name: _check(part, probe) for part in plan.parts}
    _check_forms(plan)
    run = Simulation(plan, probe, parts).act()
    _check_apart(plan, run)
    _check_bytes(plan, run)
    return run


def _check_forms(plan: Plan) -> None:
    """What is written in place has the path and the form of what it replaces, and has a node that makes it."""
    program = plan.program
    nodes = program.graph.find_nodes(op="placeholder")
    inputs = {node.name: (port, node) for port, node in zip(program.inputs, nodes, strict=True)}
    outputs = output_nodes(program.graph)
    for index, place in plan.in_place.items():
        port, new = program.outputs[index], outputs[index]
        if (old := inputs.get(place.input)) is None:
            raise PlanError(f"output {index} is to be written into {place.input}, which is no input")
        if port.role is not Role.STATE or old[0].role is Role.USER or old[0].path != port.path:
            raise PlanError(f"output {index}, {port.path}, is no new value of {place.input}")
        if not isinstance(new, fx.Node) or place.made != new.name:
            raise PlanError(f"output {index} is not made by {place.made}")
        if not _alike(value(old[1]), value(new)):
            raise PlanError(f"output {index} does not fit into {place.input}")


def _alike(before: Any, after: Any) -> bool:
    if not isinstance(before, TensorMeta) or not isinstance(after, TensorMeta):
        return False
    whole = all(stride for size, stride in zip(before.shape, before.stride, strict=True) if size > 1)
    first, second = [(item.shape, item.stride, item.dtype, item.device) for item in (before, after)]
    return whole and first == second


def _check_apart(plan: Plan, run: Simulation) -> None:
    """What is written in place is in no other output."""
    seen: dict[Block, set[int]] = {}
    for index, tensors in enumerate(run.outputs):
        for block in _blocks(tensors):
            seen.setdefault(block, set()).add(index)
    for index in plan.in_place:
        for block in _blocks(run.outputs[index]):
            if others := seen[block] - {index}:
                raise PlanError(
                    f"output {index} is written in place, and output {min(others)} shares its memory"
                )


def _blocks(tensors: Iterable[View]) -> Iterator[Block]:
    return (place.block for view in tensors for place in view.places())


def _check_bytes(plan: Plan, run: Simulation) -> None:
    if plan.memory.peak_bytes < run.peak_bytes:
        held, planned = bytes_texts(run.peak_bytes, plan.memory.peak_bytes)
        raise PlanError(f"{held} are held at once, not {planned} as planned")
    given = {view.place.block for tensors in run.inputs for view in tensors}
    given_bytes = sum(block.nbytes for block in given)
    planned_bytes = plan.memory.state_bytes + plan.memory.argument_bytes
    if planned_bytes < given_bytes:
        given_text, planned_text = bytes_texts(given_bytes, planned_bytes)
        raise PlanError(f"the inputs hold {given_text}, not {planned_text} as planned")
