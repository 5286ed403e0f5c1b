"""A plan and what it is bound to: what a backend gets of them, and what runs in the end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from monograph.backends import LoweredProgram, LoweringRequest, lower
from monograph.backends.aten import plan_to_run
from monograph.compat.tensors import storage_key
from monograph.errors import BackendError
from monograph.ir.call.signature import Spec
from monograph.ir.graph_signature import (
    MOVES,
    Argument,
    BoundProgram,
    Copy,
    Fixed,
    HeldGradient,
    Number,
    ReadAfter,
    Write,
)
from monograph.ir.meta import TensorMeta, origin, output_nodes, value
from monograph.ir.port import Role
from monograph.plan.plan import Plan
from monograph.runtime.executor import Executor
from monograph.runtime.runner import Runner, is_promised, resolving
from monograph.settings import PLAIN, Settings, is_compiled
from monograph.user_code.lines import Origin

PLANNED_ONLY: Final = f"planned as on {PLAIN} and the CPU, and not to be run: tensors on meta have no memory"


@dataclass(frozen=True)
class Runnable:
    """A bound program that a backend runs."""

    lowered: LoweredProgram
    executor: Executor


def order_of(
    bound: BoundProgram,
    plan: Plan,
    settings: Settings,
    *,
    shared: Collection[int] = (),
    report: Callable[[str], object] = str,
) -> LoweringRequest:
    """What a backend gets to lower a plan, that of the bound program after its passes."""
    waits = not settings.is_compiled and any(map(_may_fail, bound.writes))
    in_place = _in_place(bound, plan, shared) if not waits else frozenset()
    return LoweringRequest(plan, settings, in_place, report=report)


def _may_fail(write: Write) -> bool:
    """True for a number that Python computes after the step, and may refuse to: nothing is written until it is there."""
    return bool(write.moves) and bool(write.value.may_fail_after)


def why_not_in_place(bound: BoundProgram, backend: str) -> list[str]:
    """Why a backend that runs op by op keeps old and new state apart, with the lines that read numbers; empty if it need not."""
    if is_compiled(backend) or not bound.targets:  # which holds nothing any more
        return []
    first = sum(port.role is Role.USER for port in bound.program.outputs)
    outputs = zip(bound.targets, output_nodes(bound.program.graph)[first:], strict=True)
    made = {target: node for target, node in outputs if isinstance(target, ReadAfter)}
    return [
        f"{_lines(origin(made[leaf]) for leaf in write.value.leaves if isinstance(leaf, ReadAfter))}: build() computes "
        f"{write.about.removesuffix(MOVES)} from a number of this step in a way that may raise an error, as a division by 0 does: "
        "new state waits for it, so that no update is compiled or in place. Return the tensor, or keep what .item() gives, and "
        "compute outside of build()"
        for write in bound.writes
        if _may_fail(write)
    ]


def _lines(origins: Iterable[Origin]) -> str:
    return ", ".join(dict.fromkeys(f"{os.path.basename(where.file)}:{where.line}" for where in origins))


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
    order = replace(
        order_of(bound, plan, settings, shared=shared, report=report),
        copied_inputs=partial(_copied_inputs, bound, leaves),
    )
    lowered = _planned_only(order) if _is_without_data(bound, leaves) else lower(order)
    runner = resolving(lowered.runner, _promised(bound, leaves)) if settings.is_compiled else lowered.runner
    return Runnable(lowered, Executor(bound, runner, plan.program))


def _planned_only(order: LoweringRequest) -> LoweredProgram:
    """What refuses to run, with the plan that would."""
    plan = plan_to_run(order)
    return LoweredProgram(PLAIN, Runner(_refused), notes=(PLANNED_ONLY,), memory=plan.memory, plan=plan)


def _refused(inputs: list[Any]) -> Sequence[Any]:
    raise BackendError(
        "a step on the device meta cannot run: its tensors have no memory",
        hint="graph.memory(...) says what it will hold; to run it, make model and optimizer on a device with memory",
    )


def _is_without_data(bound: BoundProgram, leaves: Sequence[Any]) -> bool:
    """True if state is on the device meta, or an argument where there is no state."""
    state = [
        source.value
        for port, source in zip(bound.program.inputs, bound.sources, strict=True)
        if isinstance(source, Fixed) and port.role is not Role.CAPTURED
    ]
    devices = [item.device for item in state or leaves if isinstance(item, (torch.Tensor, Spec))]
    return any(torch.device(device).type == "meta" for device in devices)


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
