"""The `inductor` backend: the whole step, optimizer included, compiled as one unit that updates the state in place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from monograph.backends.flat import Flat, flatten
from monograph.backends.held import held_by
from monograph.backends.lowering import NOTHING_ASSUMED, Assumed, LoweredProgram, LoweringRequest, kept_for
from monograph.backends.python.generated import generated
from monograph.backends.repeating import Repeating, can_be_repeated
from monograph.compat.amp import without_autocast
from monograph.compat.inductor import loading as _inductor
from monograph.compat.inductor.building.waits import files_reported
from monograph.compat.inductor.directories import ADVICE, out_of_room, without_any_place
from monograph.compat.inductor.disk_cache import Entry, entry_for, kept, nowhere
from monograph.compat.ops import is_custom
from monograph.elementwise.one_loop import with_updates
from monograph.errors import BackendError
from monograph.ir.meta import ScalarMeta, origin, output_nodes, value
from monograph.ir.printer import spell_target
from monograph.ir.program import Program
from monograph.ir.text import count_text
from monograph.kernels.select import select_kernels
from monograph.kernels.tuned import TunedKernel
from monograph.passes.run import Stage, run_passes
from monograph.passes.table import INDUCTOR_PASSES
from monograph.plan.memory import MemoryPlan
from monograph.plan.plan import Plan
from monograph.runtime.custom_ops import checked_layouts
from monograph.runtime.one_piece import hold_in_one_piece
from monograph.runtime.runner import Runner
from monograph.runtime.workspaces import Workspaces
from monograph.settings import Settings
from monograph.state.random import cpu_state, set_cpu_state
from monograph.user_code.lines import Origin

LOGGER = logging.getLogger("monograph")
_LARGE = 2**20  # bytes of a step, from which on it is worth a piece of memory of its own


def lower(order: LoweringRequest) -> LoweredProgram:
    """Compile a plan. Raises BackendError, naming the op and the user's line, if that cannot be done."""
    if without_any_place():  # without which Inductor cannot even be imported
        raise nowhere()
    with _inductor.room_to_compile():
        return _lowered(order)


def _lowered(order: LoweringRequest) -> LoweredProgram:
    order.report("choosing kernels")
    stages, choices = prepared(with_updates(order.plan, order.in_place), order.settings)
    start = time.perf_counter()
    flat, entry, found = _looked_up(stages[-1].program, order.in_place)
    if not found:
        if entry.directory.exists():
            LOGGER.warning("the compiled step in %s is broken; compiling it again", entry.directory)
        order.report(f"writing C++ for {count_text(sum(1 for _ in stages[-1].program.ops()), 'op')}")
        with files_reported(order.report):
            _compile(flat, stages[-1].program, entry)
    call = _loaded(entry, flat)
    seconds = time.perf_counter() - start
    note = f"inductor: {'found in the cache' if found else 'compiled'} in {seconds:.1f} s ({entry.library.parent})"
    stage = Stage("inductor", stages[-1].program, seconds)
    runner = replace(_runner(order.plan.program, flat, call), failure=partial(_failure, order.plan))
    if can_be_repeated(order.plan.program, flat, entry):
        runner = replace(runner, repeat=Repeating(entry.library, order.plan.program, flat))
    if entry.calls_python_ops and order.copied_inputs is not None:
        _try(runner, order.copied_inputs(), order.plan.program)
    memory = held_by(entry.stretches, stages[-1].program, order.plan.memory)
    notes = [note, *_kept(entry, flat, order.plan, memory)]
    if kernels_of_torch := _inductor.called_kernels(entry.library):
        notes.append(f"left to torch's own kernels: {', '.join(kernels_of_torch)}")
    guard = _inductor.pointer_guard_in(entry.library)
    assumed = Assumed(tuple(entry.assumed), flat.places) if flat.places else NOTHING_ASSUMED
    return LoweredProgram(
        "inductor", runner, (*stages, stage), tuple(notes), choices, guard, assumed, memory=memory
    )


def _kept(entry: Entry, flat: Flat, plan: Plan, memory: MemoryPlan | None) -> tuple[str, ...]:
    """Let the process keep the memory of a step on CPUs for the next one; a note if it does."""
    size = 0 if memory is None or flat.device.type != "cpu" or flat.places else memory.peak_bytes
    if size < _LARGE or not hold_in_one_piece(entry.library):
        return kept_for(plan, memory or plan.memory)
    return (
        f"the process keeps {size / 2**20:.0f} MiB for the next step, in which each tensor has its place",
    )


def _looked_up(program: Program, in_place: Collection[int]) -> tuple[Flat, Entry, bool]:
    """What is compiled, its place in the cache, and whether it is there: then nothing of Inductor need be imported."""
    for flagged in (True, False):
        flat = flatten(program, in_place, flagged=flagged)
        entry = _entry(flat)
        found = entry.is_whole()
        if found or not flat.is_flagged or _inductor.writes_come_last():
            break
    return flat, entry, found


def _entry(flat: Flat) -> Entry:
    """The place of compiled code: that for sizes that vary, unless what is there assumes what these sizes are not."""
    entry = entry_for(flat.text, flat.examples)
    if flat.places and entry.is_whole() and not all(map(flat.holds, entry.assumed)):
        entry = entry_for(flat.text, [*flat.examples, tuple(flat.sizes.items())])
    return entry


def prepared(program: Program, settings: Settings) -> tuple[tuple[Stage, ...], tuple[TunedKernel, ...]]:
    """The forms that a program takes on its way to the compiler, and the kernels that were chosen for it."""
    first = Stage("plan", program, 0.0)
    stages = run_passes(first, [row.run for row in INDUCTOR_PASSES])[1:]
    kernels, choices = select_kernels(stages[-1], settings)
    return (*stages, kernels), choices


def _try(runner: Runner, inputs: list[Any], program: Program) -> None:
    """Run once on copies: ops without a C interface may fail, or give another layout than their fake kernels.

    Neither must happen in the middle of a real step, and compiled code does not look at layouts. What fails op by op as
    well is for the step to report: its arguments are at fault.
    """
    custom = [node for node in program.ops() if is_custom(node.target)]
    with torch.random.fork_rng(devices=()), torch.no_grad():
        state = cpu_state()
        try:
            with checked_layouts(custom):
                runner.run(runner.prepare(inputs) if runner.prepare is not None else inputs)
        except RuntimeError as error:
            set_cpu_state(state)
            if runner.failure is None or runner.failure(inputs) is None:
                raise BackendError(
                    f"the compiled step does not run: {str(error).splitlines()[0]}",
                    hint="an op of it has no C interface; the aten backend runs it",
                ) from error


def _compile(flat: Flat, program: Program, entry: Entry) -> None:
    try:
        with entry.written() as library:
            try:
                _compile_module(flat, library)
            except Exception as error:
                raise translated(error, program) from error
    except OSError as error:
        raise BackendError(
            f"compiled code cannot be kept in {entry.directory.parent}: {error.strerror}", hint=ADVICE
        ) from error


def _loaded(entry: Entry, flat: Flat) -> _inductor.Call:
    try:
        return _inductor.load_library(entry.library, flat.device)
    except (RuntimeError, OSError) as error:
        raise BackendError(
            f"{entry.library} cannot be loaded: {str(error).partition(chr(10))[0]}",
            hint=f"where a disk lets no code run, {ADVICE}",
        ) from error


def _compile_module(flat: Flat, library: Path, *, copied: bool = False) -> None:
    """Compile a step. If a kernel would write into state and could fail as well, what is written is computed apart."""
    module = flat.apart() if copied else flat.module
    try:
        _inductor.compile_to_library(
            module,
            flat.examples,
            flat.device,
            library,
            kept,
            Workspaces().allocated_by,
            flagged=flat.is_flagged,
            copied=copied,
        )
    except Exception as error:
        if copied or not _inductor.is_unordered(error):
            raise
        _compile_module(flat, library, copied=True)


def translated(error: Exception, program: Program) -> BackendError:
    """The error for a compilation that failed: the op and its line, or that there is no compiler."""
    if isinstance(error, BackendError):
        return error
    if out_of_room(error):
        hint = f"{ADVICE}, and TMPDIR to one with room for temporary files"
        return BackendError("the disk is full: the step cannot be compiled", hint=hint)
    if (missing := _inductor.compiler_missing()) is not None:
        return BackendError(
            f"no C++ code can be compiled here: {missing}",
            hint='install g++, or use config.backend("aten")',
        )
    name = _inductor.op_at_fault(error)
    what, where = "the step", Origin()
    if name is not None:
        what = name
        for node in program.ops():
            if spell_target(node.target) in (name, f"torch.ops.{name}"):
                where = origin(node)
                break
    text = str(error).strip().splitlines()
    return BackendError(
        f"Inductor cannot compile {what}: {type(error).__name__}: {text[0] if text else ''}",
        where=where,
        hint="the aten backend runs it",
    )


def _runner(
    program: Program, flat: Flat, call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
) -> Runner:
    """Bind a compiled function: numbers go in by memory that both sides see, and come out as numbers."""
    slots = [
        (position, *_slot(described.kind))
        for position, node in enumerate(program.graph.find_nodes(op="placeholder"))
        if isinstance(described := value(node), ScalarMeta)
    ]
    outputs = output_nodes(program.graph)
    scalars = [
        position
        for position, item in enumerate(outputs)
        if isinstance(item, fx.Node) and isinstance(value(item), ScalarMeta)
    ]
    views = None if flat.views is None else flat.views.forward
    constants = [item if not isinstance(item, fx.Node) else None for item in outputs]
    begun, flag = _slot("int")

    def prepare(inputs: list[Any]) -> list[Any]:
        for position, cell, tensor in slots:
            cell[()] = inputs[position]
            inputs[position] = tensor
        if flat.is_flagged:
            begun[()] = 0
            inputs.append(flag)
        return inputs

    def finish(results: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[Any]:
        made: list[Any] = constants.copy()
        for position, index in flat.returned:
            made[position] = results[index]
        if views is not None:
            sources = [
                inputs[source.index] if source.is_input else results[source.index] for source in flat.sources
            ]
            for position, view in zip(flat.viewed, views(*sources), strict=True):
                made[position] = view
        for position in scalars:
            made[position] = made[position].item()
        return made

    return Runner(call, prepare, finish, flat.written, (lambda: bool(begun[()])) if flat.is_flagged else None)


def _failure(plan: Plan, inputs: Sequence[Any]) -> Exception | None:
    """What the plan raises op by op for inputs that the compiled step has refused; numbers may have become tensors."""
    nodes = plan.program.graph.find_nodes(op="placeholder")
    given = [
        item.item() if isinstance(value(node), ScalarMeta) and isinstance(item, torch.Tensor) else item
        for node, item in zip(nodes, inputs, strict=False)
    ]
    try:
        with torch.no_grad(), without_autocast():
            generated(plan)(given)
    except Exception as error:
        return error
    return None


def _slot(kind: str) -> tuple[Any, torch.Tensor]:
    dtypes: Mapping[str, Any] = {"float": np.float64, "int": np.int64, "bool": np.bool_}
    cell: Any = np.zeros((), dtypes[kind])
    return cell, torch.from_numpy(cell)
