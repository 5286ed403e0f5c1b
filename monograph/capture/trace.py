"""capture(): trace the user's step once and make a program of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from monograph._torch import DATA_DEPENDENT, import_capture_modules, missing_fake_kernel
from monograph.capture.bindings import (
    Argument,
    Copy,
    CopyToArgument,
    Fixed,
    Number,
    Result,
    Source,
    Target,
    Write,
)
from monograph.capture.calls import ModuleCall
from monograph.capture.functional import Functional, functionalise, lift_generators
from monograph.capture.generators import KnownGenerators
from monograph.capture.guards import Guards
from monograph.capture.optimizers import Declared, declare_state
from monograph.capture.scalars import read_outs, scalar_conditions, symbols_read_out
from monograph.capture.signature import Spec
from monograph.capture.standins import Input
from monograph.capture.state import Holdings, check_holdings, overlapping
from monograph.capture.step import Request, TracedStep
from monograph.capture.transaction import take_snapshot, torch_modes
from monograph.errors import (
    AliasError,
    CaptureError,
    DataDependentError,
    MonographError,
    is_user_file,
    user_place_of,
)
from monograph.ir.meta import forget_torch_meta
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.tree import Tree

LOGGER = logging.getLogger("monograph")
TRACE_LOCK = threading.RLock()  # torch's tracing state is per process in places: one trace at a time


@dataclass(frozen=True)
class Captured:
    """A program, the facts it stands on, and how its border is bound to the outside at each call."""

    program: Program
    guards: Guards
    sources: tuple[Source, ...]  # of the inputs
    targets: tuple[Target, ...]  # of the outputs behind the results
    writes: tuple[Write, ...]
    results: tuple[Result, ...]  # the leaves of what the call returns
    result_tree: Tree
    steps: Mapping[str, int]  # how often each optimizer steps in one call
    without_gradient: tuple[str, ...]
    notes: tuple[str, ...]
    module_io: Mapping[str, tuple[ModuleCall, ...]]  # by path; "" is build() itself

    def unbound(self) -> Captured:
        """The same without what binds it to live tensors; those are held by the executor and the guards."""
        return replace(self, sources=(), targets=(), writes=(), results=())


def capture(request: Request) -> Captured:
    """Capture a step. On failure everything is as before, and the error names the user's line."""
    import_capture_modules()
    with TRACE_LOCK, torch_modes():
        try:
            return _capture(request, with_values=False)
        except Exception as error:
            specs = any(isinstance(leaf, Spec) for leaf in request.call.leaves)
            if isinstance(error, MonographError) or specs or not missing_fake_kernel(error):
                raise _translated(error) from error
            LOGGER.warning("%s: %s; tracing on real tensors instead", request.name, _first_line(error))
    return capture_with_values(request)


def capture_with_values(request: Request) -> Captured:
    """Capture on stand-ins that carry copies of the real data, for ops whose fake kernel is missing or wrong."""
    with TRACE_LOCK, torch_modes():
        try:
            return _capture(request, with_values=True)
        except Exception as error:
            raise _translated(error) from error


def _capture(request: Request, *, with_values: bool) -> Captured:
    holdings = request.holdings
    modules = holdings.named_modules()
    check_holdings(holdings, modules)
    snapshot = take_snapshot(holdings, modules)
    snapshot.random.touched = with_values
    generators = KnownGenerators(request, modules)
    kept: list[tuple[dict[str, Any], str, Any]] = []
    lost: list[str] = []
    moved: list[str] = []
    try:
        declared = {held.name: declare_state(held) for held in holdings.optimizers}
        _install(holdings, declared)
        step = TracedStep(request, modules, with_values, snapshot)
        with snapshot.seeding_noted():
            recorded = step.record()
            while step.group_counters:  # a constant of this trace that the step moves is an input of the next
                snapshot.restore()
                _install(holdings, declared)
                counters = step.known_counters | step.group_counters
                step = TracedStep(request, modules, with_values, snapshot, known_counters=counters)
                recorded = step.record()
        kept = step.leftovers.plain_writes(step.reads)
        writes = step.leftovers.settling_writes(step.reads)
        lost = step.leftovers.lost_writes(step.reads)
        moved = [name for name in snapshot.random.moved() if not (with_values and name == "torch")]
        if writes:
            snapshot.restore()
            _install(holdings, declared)
            step.leftovers.fill_attributes()
            for write in writes:
                write.container[write.key] = write.value
            _check_settled(TracedStep(request, modules, with_values, snapshot))
    finally:
        changed = snapshot.restore()
        moved += ["a generator"] if generators.restore() and not with_values else []
    changed = [path for path in changed if not {path, f"graph.{path}"} & step.leftovers.carried]
    if "torch" in moved or "a generator" in moved:
        raise CaptureError(
            "build() reseeds a random generator of torch, or draws from it outside of tensor ops",
            hint="seed before the step, not in build()",
        )
    kept += step.leftovers.own_memory()
    extras = step.leftovers.extras
    replaced = {id(extra.target.tensor) for extra in extras if isinstance(extra.target, Copy)}
    with step.values(), snapshot.random.kept():
        functional = functionalise(
            recorded,
            step.inputs.mode,
            step.inputs.stand_ins,
            num_state=len(extras),
            overwritten=[i for i, item in enumerate(step.inputs.items) if id(item.real) in replaced],
        )
    captured = _assemble(request, step, recorded, functional)
    generators.check(item.real for item in step.inputs.items if item.role is Role.RNG)
    _install(holdings, declared, only=step.stepped)
    for optimizer, owner in step.empty_state:
        optimizer.state[owner] = {}
    for table, name, value in kept:
        table[name] = value
    notes = [f"build() draws from {name}: the numbers drawn at capture are constants" for name in moved]
    notes += [
        f"build() changes the container {path}: the change is undone and not replayed" for path in changed
    ]
    notes += [
        f"build() sets {path}, which is no tensor and no plain value: it is undone and not replayed" for path in lost
    ]
    for note in notes:
        LOGGER.warning("%s: %s", request.name, note)
    return captured(modules, tuple(notes), tuple(writes))


def _check_settled(step: TracedStep) -> None:
    """What build() read and changed must stay as it is in the step after: a flag may be raised once, not a count."""
    step.record()
    for write in step.leftovers.settling_writes(step.reads):
        raise CaptureError(
            f"build() reads and changes the Python attribute {write.about}: each step would differ",
            hint="make it a buffer, self.register_buffer(name, torch.tensor(0)), and change it in place; "
            "an optimizer counts in a param group or in the state of a parameter",
        )


def _install(
    holdings: Holdings, declared: Mapping[str, list[Declared]], only: set[int] | None = None
) -> None:
    """Put declared first state into the optimizers."""
    for held in holdings.optimizers:
        for first in declared[held.name]:
            if only is None or id(first.parameter) in only:
                held.optimizer.state[first.parameter] = first.entries


def _assemble(request: Request, step: TracedStep, recorded: fx.GraphModule, functional: Functional) -> Any:
    """Name the border of the functional graph, and drop the inputs that nothing reads."""
    module, inputs, leftovers = functional.module, step.inputs, step.leftovers
    for generator in lift_generators(module):
        inputs.add(generator, Role.RNG, f"generator.{len(inputs.items)}", Fixed(generator))
    backed, unbacked = (
        inputs.symbols,
        dict(zip(symbols_read_out(recorded.graph), read_outs(module.graph), strict=True)),
    )
    conditions = scalar_conditions(
        step.branches, backed, unbacked, inputs.roles, [item.path for item in inputs.items]
    )
    num_results = functional.num_results - len(leftovers.extras)
    outputs = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    _check_aliases(request, inputs.items, functional.changed)
    targets: list[Target] = [extra.target for extra in leftovers.extras]
    paths = [extra.path for extra in leftovers.extras]
    reassigned = {id(target.tensor) for target in targets if isinstance(target, Copy)}
    kept = outputs[: functional.num_results]
    for position, output in zip(functional.changed, outputs[functional.num_results :], strict=True):
        item = inputs.items[position]
        if id(item.real) in reassigned:
            continue  # build() put another tensor in its place afterwards
        source = item.source
        targets.append(CopyToArgument(source.index) if isinstance(source, Argument) else Copy(item.real))
        paths.append(item.path)
        kept.append(output)
    module.graph.output_node().args = (kept,)
    names = ["result"] * num_results + [""] * len(targets)
    ports = [
        Port(
            f"out{i}",
            Role.USER if i < num_results else Role.STATE,
            f"{name}.{i}" if name else paths[i - num_results],
        )
        for i, name in enumerate(names)
    ]
    _rename(module.graph, inputs.items)
    for node in module.graph.nodes:
        forget_torch_meta(node)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    in_ports = tuple(
        Port(node.name, item.role, item.path) for node, item in zip(nodes, inputs.items, strict=True)
    )
    module.recompile()
    program = Program(
        f"{'train' if request.holdings.optimizers else 'infer'}_step", module, in_ports, tuple(ports)
    )

    counters = [
        item.source
        for item in inputs.items
        if isinstance(item.source, Number) and item.path in step.known_counters
    ]

    def finish(
        modules: Mapping[str, nn.Module], notes: tuple[str, ...], writes: tuple[Write, ...]
    ) -> Captured:
        return Captured(
            program,
            Guards(request.holdings, modules, step.reads, inputs.tensors(), conditions, request.call, counters),
            tuple(item.source for item in inputs.items),
            tuple(targets),
            writes,
            tuple(leftovers.results),
            leftovers.result_tree,
            dict(step.steps),
            tuple(leftovers.without_gradient),
            notes,
            step.module_io(),
        )

    return finish


def _check_aliases(request: Request, items: list[Input], changed: tuple[int, ...]) -> None:
    """Refuse memory that is changed under one name and read under another."""
    written = {items[position].path for position in changed}
    state = {item.path: item.real for item in items if isinstance(item.real, torch.Tensor)}
    leaves = {i.path: request.call.leaves[i.source.index] for i in items if isinstance(i.source, Argument)}
    arguments = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    for pair in overlapping(state | arguments):
        if not written & set(pair):
            continue
        first, second = sorted(pair, key=arguments.__contains__, reverse=True)
        if first not in arguments:
            raise AliasError(
                f"{first} and {second} overlap in memory and the step changes them",
                hint="give each its own memory with .clone(), or tie them as one parameter",
            )
        names = f"arguments {first} and {second}" if second in arguments else f"argument {first} and {second}"
        raise AliasError(f"{names} share memory, and the step changes it", hint=f"pass a clone of {first}")


def _rename(graph: fx.Graph, items: list[Input]) -> None:
    """Give placeholders names that a reader knows."""
    used: set[str] = set()
    for node in graph.nodes:
        if node.op != "placeholder":
            used.add(node.name)
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for node, item in zip(nodes, items, strict=True):
        name = "".join(c if c.isalnum() else "_" for c in item.path.replace("/", "__")).strip("_")
        name = (
            f"{item.role.value}_{name}"
            if not name[:1].isalpha() or name in ("aten", "torch", "math")
            else name
        )
        while name in used:
            name += "_"
        used.add(name)
        node.name = node.target = name


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _translated(error: Exception) -> Exception:
    """The error for the user: what happened at which of their lines, and what to do."""
    place = user_place_of(error)
    if isinstance(error, MonographError):
        if error.where is None and place.file:
            error.where = place
        return error
    if type(error).__name__ in DATA_DEPENDENT:
        return DataDependentError(
            "Python asked for the value of a tensor while the step was being captured",
            where=place,
            hint="use torch.where or torch.cond, a padded form instead of boolean-mask indexing, "
            "or move the test out of build()",
        )
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is not None and is_user_file(traceback.tb_frame.f_code.co_filename):
        return error  # raised by the user's own code: theirs to see as it is
    return CaptureError(
        f"capture failed: {_first_line(error)}",
        where=place,
        hint="graph.eager(...) runs the same step without a capture: if it fails there too, the step is at fault",
    )
