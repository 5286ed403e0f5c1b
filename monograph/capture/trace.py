"""capture(): trace the user's step once and make a program of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import fx, nn

from monograph.capture.effects.attribute_values import PutAgain
from monograph.capture.effects.foreign_objects import Effects, bind, refresh
from monograph.capture.effects.held_fakes import not_repeatable
from monograph.capture.effects.python_objects.counters import Counters, Uncounted
from monograph.capture.effects.python_objects.growth import Growth, NewEntries
from monograph.capture.effects.python_objects.number_places import Place, unique
from monograph.capture.effects.python_objects.stored import Stored
from monograph.capture.errors import first_line, translated
from monograph.capture.guards.guards import Guards
from monograph.capture.guards.offsets import Offsets
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.questions import answers
from monograph.capture.guards.weak import loosened
from monograph.capture.numbers.known import known_value
from monograph.capture.numbers.same_ops import first_difference
from monograph.capture.optimizers.tracing import Declared, change_state, declare_state
from monograph.capture.ports import GraphSignature, graph_signature
from monograph.capture.process.hooks import hooks_of
from monograph.capture.process.signals import handlers_held_back
from monograph.capture.step.generators import KnownGenerators
from monograph.capture.step.observer import SILENT
from monograph.capture.step.request import Request
from monograph.capture.step.traced_step import TracedStep
from monograph.capture.tensors.conditions import Conditions
from monograph.capture.tensors.functional.functionalise import functionalise
from monograph.capture.tensors.functional.overlaps import check_own_memory, looked_beyond
from monograph.capture.tensors.functional.view_writes import write_directly
from monograph.capture.tensors.functional.written_twice import check_writes
from monograph.compat.amp import is_dynamic_scaler, make_scale, without_autocast
from monograph.compat.fake_values import VALUES_NOT_KNOWN
from monograph.compat.fakes import import_capture_modules, missing_fake_kernel, refused_by_fake_kernel
from monograph.errors import CaptureError, MonographError
from monograph.ir.call.signature import Spec
from monograph.ir.call_text import ModuleCall
from monograph.ir.graph_signature import (
    Between,
    BoundProgram,
    Copy,
    Number,
    Result,
    Write,
)
from monograph.ir.port import Role
from monograph.state.find import Owned, check_owned
from monograph.state.snapshot import Snapshot, alone, take_snapshot, torch_modes
from monograph.user_code.lines import Origin

LOGGER = logging.getLogger("monograph")
_ABSENT = object()
TRACE_LOCK = threading.RLock()  # torch's tracing state is per process in places: one trace at a time


@dataclass(frozen=True)
class Captured(BoundProgram):
    """A program bound to what it was captured from, and its guards."""

    guards: Guards
    steps: Mapping[str, int]  # how often each optimizer steps in one call
    without_gradient: tuple[str, ...]
    notes: tuple[str, ...]
    hooks: tuple[str, ...]
    module_io: Mapping[str, tuple[ModuleCall, ...]]  # by path; "" is build() itself
    effects: Effects  # what build() changes in objects that the graph does not hold
    grown: tuple[Growth | NewEntries | Stored, ...]  # what build() adds to lists and dicts, and stores
    put_again: PutAgain  # what it only sets
    unraised: Conditions  # its branches, and that no arithmetic of the program raises: compiled code does not
    own: tuple[OwnPlace, ...]  # where each step puts a new tensor
    undo: Callable[[], object]  # takes first optimizer state, and attributes that build() set, away again

    def __repr__(self) -> str:
        return f"<Captured {self.program!r}>"

    def for_good(self) -> Self:
        """The same without what would undo it, which keeps the state of before alive."""
        return replace(self, undo=_nothing)

    def unbound(self) -> Self:
        """The same without what binds it to live tensors; those are held by the executor and the guards."""
        return replace(super().unbound(), undo=_nothing)


def capture(request: Request) -> Captured:
    """Capture a step. On failure everything is as before, and the error names the user's line."""
    import_capture_modules()
    request = replace(request, answers=answers())
    return _in_trace(partial(_captured_on_fakes, request))


def capture_with_values(request: Request) -> Captured:
    """Capture on fakes that carry copies of the real data, for ops whose fake kernel is missing or wrong."""
    request = replace(request, answers=request.answers or answers())

    def captured() -> Captured:
        try:
            return _capture(request, with_values=True)
        except Exception as error:
            raise translated(error, request.owned) from error

    return _in_trace(captured)


def _in_trace(make: Callable[[], Captured]) -> Captured:
    """One trace at a time, and what signal handlers raise after it undoes it."""
    captured: Captured | None = None
    try:
        with TRACE_LOCK, handlers_held_back(), torch_modes():
            captured = make()
    except BaseException:
        if captured is not None:
            captured.undo()
        raise
    return captured


def _captured_on_fakes(request: Request) -> Captured:
    try:
        return _capture(request, with_values=False)
    except Exception as error:
        specs = any(isinstance(leaf, Spec) for leaf in request.call.leaves)
        missing, refused = missing_fake_kernel(error), refused_by_fake_kernel(error)
        if isinstance(error, MonographError) or specs or not (missing or refused):
            raise translated(error, request.owned) from error
        try:
            captured = capture_with_values(request)
        except Exception as second:
            if missing or VALUES_NOT_KNOWN not in str(second):
                raise  # the real kernel refuses too, in its own words, or the second trace came further
            raise translated(error, request.owned) from error
        LOGGER.warning("%s: %s; traced on real tensors instead", request.name, first_line(error))
        return captured


def _nothing() -> None:
    pass


def _capture(request: Request, *, with_values: bool) -> Captured:
    modules = request.owned.named_modules()
    check_owned(request.owned, modules)
    _prepare_scaler(request.owned)
    snapshot = take_snapshot(request.owned, modules)
    generators = KnownGenerators(request, modules)
    traced = _traced(request, modules, snapshot, generators, with_values=with_values)
    step = traced.step
    check_own_memory(traced.recorded.graph, step.inputs.items)
    check_writes(traced.recorded.graph)
    reaching = looked_beyond(traced.recorded.graph, step.inputs.items)
    write_directly(traced.recorded)
    own = step.side_effects.own_memory()
    kept = [(place.container, place.key, value) for place, value in own]
    state_outputs = step.side_effects.state_outputs
    replaced = {
        id(state_output.target.tensor)
        for state_output in state_outputs
        if isinstance(state_output.target, Copy)
    }
    with without_autocast(), step.values(), snapshot.random.kept():
        functional = functionalise(
            traced.recorded,
            step.inputs.mode,
            step.inputs.fakes,
            partial(known_value, literals=step.literals),
            num_state=len(state_outputs),
            overwritten=[i for i, item in enumerate(step.inputs.items) if id(item.real) in replaced],
        )
    signature = graph_signature(request, step, traced.recorded, functional, reaching=reaching)
    generators.check(item.real for item in step.inputs.items if item.role is Role.RNG)
    undo = _undoing(request.owned, traced.kept + kept)
    try:
        _commit(request.owned, traced, kept)
        return _captured(request, modules, traced, signature, own, undo)
    except BaseException:
        undo()
        raise


def _prepare_scaler(owned: Owned) -> None:
    """A dynamic scaler has its scale from now on, on the device of the first parameter that is trained."""
    trained = [parameter for item in owned.optimizers for parameter in item.parameters]
    held = [p for module in owned.modules.values() for p in module.parameters()]
    if is_dynamic_scaler(owned.scaler):
        make_scale(owned.scaler, next((p.device for p in trained + held), torch.device("cpu")))


def _captured(
    request: Request,
    modules: Mapping[str, nn.Module],
    traced: _Traced,
    signature: GraphSignature,
    own: Sequence[tuple[OwnPlace, Any]],
    undo: Callable[[], object],
) -> Captured:
    """What a trace has found, bound to the state as it is now."""
    step = traced.step
    for note in traced.notes:
        LOGGER.warning("%s: %s", request.name, note)
    items = step.inputs.items
    counters = [i.source for i in items if isinstance(i.source, Number) and i.path in step.known_counters]
    idle = {held.name for held in request.owned.optimizers if not step.steps.get(held.name)}
    for owner, name in step.reads.written_first():
        step.reach.leave_out(owner, name)
    refresh(step.reach.sources, step.snapshot.covered)
    places = step.side_effects.places() | {(id(place.container), place.key): value for place, value in own}
    places |= {
        (id(place.container), place.key): object() for place in step.side_effects.gone
    }  # it serves no step
    bind(step.reach.sources, places)
    step.numbers.release(step.reach.sources)
    kept = step.grown.release(step.reach.sources)
    sources = loosened(kept, step.reach.weak, request.owned.owner)
    step.stored.release(step.inputs)
    tensors = {
        path: tensor for path, tensor in step.inputs.tensors().items() if path.partition("/")[0] not in idle
    }
    return Captured(
        program=signature.program,
        guards=Guards(
            request.owned,
            modules,
            sources,
            tensors,
            signature.conditions,
            request.call,
            Offsets(
                signature.program.ops(),
                request.call,
                signature.overlaps,
                read=step.asked_for_offsets or any(map(_shows_bits, signature.all_results())),
            ),
            counters,
            {**step.state_owners(), **dict.fromkeys(idle, ())},
            once=traced.once,
            own=[place for place, _ in own],
            sparse=step.inputs.sparse,
            weak=step.reach.weak,
        ),
        sources=tuple(item.source for item in items if item.source != Between()),
        targets=signature.targets,
        writes=tuple(traced.writes),
        results=signature.results,
        result_tree=step.side_effects.result_tree,
        changes=signature.changes,
        steps=dict(step.steps),
        without_gradient=tuple(step.side_effects.without_gradient),
        notes=tuple(traced.notes),
        hooks=hooks_of(modules, tensors),
        module_io=step.module_io(),
        effects=traced.effects,
        grown=(*step.grown.found, *step.stored.found),
        put_again=traced.put_again,
        unraised=signature.unraised,
        own=tuple(place for place, _ in own),
        undo=undo,
    )


def _shows_bits(result: Result) -> bool:
    """True for a view by another dtype: where it begins must be a multiple of that."""
    return result.live is not None and result.live.dtype is not None


@dataclass(frozen=True)
class _Traced:
    """A recorded step, with everything outside put back as it was."""

    step: TracedStep
    recorded: fx.GraphModule
    declared: Mapping[str, list[Declared]]
    kept: list[tuple[dict[str, Any], str, Any]]  # attributes that build() set to plain values
    writes: list[Write]
    put_again: PutAgain
    effects: Effects
    once: list[str]  # what no replay does again
    notes: list[str]


def _traced(
    request: Request,
    modules: Mapping[str, nn.Module],
    snapshot: Snapshot,
    generators: KnownGenerators,
    *,
    with_values: bool,
) -> _Traced:
    """Trace the step, and once more where the first trace shows that more has to be an input."""
    snapshot.random.touched = with_values
    again = replace(request, observer=SILENT)  # a retrace is logged once
    kept: list[tuple[dict[str, Any], str, Any]] = []
    lost: list[str] = []
    made: list[Write] = []
    moved: list[str] = []

    def retraced(
        first: TracedStep,
        still: frozenset[str],
        counters: frozenset[str] = frozenset(),
        numbers: Counters | None = None,
    ) -> TracedStep:
        _check_undone(first.effects)
        snapshot.roll_back()
        return TracedStep(
            *(again, modules, with_values, snapshot, declared, still),
            known_counters=counters,
            numbers=numbers or Counters(),
        )

    try:
        declared = {held.name: declare_state(held) for held in request.owned.optimizers}
        step = TracedStep(request, modules, with_values, snapshot, declared)
        with snapshot.seeding_noted():
            step, recorded, why_still = _recorded(step, retraced)
            if vain := set(map(id, step.declared_in_vain())):
                declared = {
                    name: [item for item in found if id(item) not in vain] for name, found in declared.items()
                }
                step = retraced(step, step.still)
                recorded = step.record()
            while step.group_counters:  # a constant of this trace that the step moves is an input of the next
                step = retraced(step, step.still, step.known_counters | step.group_counters)
                recorded = step.record()
            step, recorded = _with_numbers(step, recorded, retraced)
        kept = step.side_effects.plain_writes(step.reads)
        writes = step.side_effects.moving_writes(step.reads) + step.number_writes
        exchanged, only_put = step.side_effects.exchanged(step.reads)
        made = step.side_effects.made_lazily(step.reads) + exchanged
        known = {write.about for write in [*made, *only_put]}
        put_again = step.side_effects.put_again(step.reads)
        lost = [path for path in step.side_effects.lost_writes(step.reads) if path not in known]
        moved = [name for name in snapshot.random.moved() if not (with_values and name == "torch")]
    finally:
        try:
            changed = snapshot.roll_back()
        except BaseException:  # an interrupt in the middle: without this, fakes would stay in the modules
            snapshot.roll_back()
            raise
        moved += ["a generator"] if generators.restore() and not with_values else []
    if "torch" in moved or "a generator" in moved:
        raise CaptureError(
            "build() reseeds a random generator of torch, or draws from it outside of tensor ops",
            hint="seed before the step, not in build()",
        )
    if changed := _not_carried(step, changed):
        raise not_repeatable(changed[0])
    notes = _notes(moved, lost, step.effects)
    if step.still:
        names = ", ".join(sorted(step.still))
        notes.append(
            f"another value of {names} needs another build: code takes no number that moves ({why_still})"
        )
    unguarded = [
        f"build() asks for {what} ({where}): what it gets there is a constant of this build"
        for what, where in step.reach.unguarded.items()
    ]
    if request.settings.strict and (found := [*unguarded, *_repeated(step.effects)]):
        raise CaptureError(
            found[0],
            where=next(iter(step.reach.unguarded.values()), Origin()) if unguarded else Origin(),
            hint="pass what is read as an argument; config.strict(False) makes this a warning",
        )
    notes += unguarded
    notes += [
        f"build() calls {name}, whose cache got tensors of the step: they are forgotten, and each step computes them; "
        "call it once before the first step, and it gives what it has kept"
        for name in step.forgotten
    ]
    if step.changes_arguments:
        notes.append(
            "build() changes a list, a dict, an object or requires_grad among its arguments, and with gradient "
            "accumulation each micro-batch has its own: the caller's stays as it is"
        )
    once = [*step.effects.once, *(write.about for write in made)]
    return _Traced(step, recorded, declared, kept, writes + made, put_again, step.effects, once, notes)


def _recorded(
    step: TracedStep, retraced: Callable[[TracedStep, frozenset[str]], TracedStep]
) -> tuple[TracedStep, fx.GraphModule, str]:
    """The step with what it recorded. Where code takes no number that moves, such numbers are constants, and why."""
    try:
        return step, step.record(), ""
    except (TypeError, AttributeError) as error:
        if isinstance(error, MonographError):
            raise
        choices, why = step.inputs.numbers(), first_line(error)
        if not choices:
            raise
    for still in choices[:-1]:
        step = retraced(step, still)
        try:
            return step, step.record(), why
        except (TypeError, AttributeError):
            continue
    step = retraced(step, choices[-1])
    return step, step.record(), why  # an error now is one of plain numbers too


def _with_numbers(
    step: TracedStep, recorded: fx.GraphModule, retraced: Callable[..., TracedStep]
) -> tuple[TracedStep, fx.GraphModule]:
    """The step once more, with numbers that move where plain ones do not stay; the same if that cannot be.

    Those are the numbers that it changes itself, and those that have changed since an earlier build was made.
    """
    if step.effects.lost or step.request.settings.accumulation_steps > 1:
        return step, recorded
    changed = unique(step.changed_numbers())
    with_outside = unique([*changed, *step.moved_numbers()])
    trials = [with_outside, changed] if len(with_outside) > len(changed) else [changed]
    for places in filter(None, trials):
        found = _counted(step, recorded, places, retraced, as_plain=places is not changed)
        if found is not None:
            return found
    if not any(trials):
        return step, recorded
    step = retraced(step, step.still, step.known_counters)
    return step, step.record()


def _counted(
    step: TracedStep,
    recorded: fx.GraphModule,
    places: Sequence[Place],
    retraced: Callable[..., TracedStep],
    *,
    as_plain: bool,
) -> tuple[TracedStep, fx.GraphModule] | None:
    """The step with numbers that move in these places; None if they are used in a way that cannot be followed.

    With `as_plain` it must do what it does with the plain numbers that are there now.
    """
    lost, numbers = {*step.side_effects.lost_writes(step.reads)}, Counters(places)
    touched = step.snapshot.random.touched
    try:
        counted = retraced(step, step.still, step.known_counters, numbers)
        found = counted.record()
        numbers.check(counted.reach, counted.effects, step.effects, counted.overwritten)
        if more := {*counted.side_effects.lost_writes(counted.reads)} - lost:
            raise Uncounted(more.pop())
        numbers.remove()
        if left := _not_carried(counted, counted.snapshot.changed_containers()):
            raise Uncounted(left[0])
        if as_plain and (other := first_difference(recorded.graph, found.graph)):
            raise Uncounted(other)
        return counted, found
    except Exception as error:  # what is wrong with the step itself, the next trace reports
        LOGGER.debug("%s: numbers that change are constants: %s", step.request.name, first_line(error))
        step.snapshot.random.touched = touched
        return None
    finally:
        numbers.remove()


def _not_carried(step: TracedStep, changed: Iterable[str]) -> list[str]:
    """Of the containers that a trace has changed those that no replay changes."""
    return [path for path in changed if not {path, f"graph.{path}"} & step.side_effects.carried]


def _notes(moved: Sequence[str], lost: Sequence[str], effects: Effects) -> list[str]:
    """What a user should know of a capture: what is constant, and what is not replayed."""
    drawing = "build() draws" if alone() else "build() or another thread draws"
    notes = [f"{drawing} from {name}: the numbers drawn at capture are constants" for name in moved]
    notes += [
        f"build() sets {path}, which is no tensor and no plain value: it is undone and not replayed"
        for path in lost
    ]
    notes += [
        f"build() puts tensors into {name}, which the graph does not hold: that is undone and not replayed"
        for name in effects.held
    ]
    return notes + _repeated(effects)


def _repeated(effects: Effects) -> list[str]:
    return [
        f"build() changes {name} in a way that only a new capture can repeat: each step that does so is captured anew"
        for name in effects.once
    ]


def _check_undone(effects: Effects) -> None:
    """A step that has to be traced twice must begin both times with the same."""
    if effects.lost:
        raise CaptureError(
            f"build() changes {effects.lost[0]}, which cannot be put back, and has to be traced twice",
            hint="draw from it outside of build(), and pass what was drawn as an argument",
        )


def _commit(owned: Owned, traced: _Traced, places: list[tuple[dict[str, Any], str, Any]]) -> None:
    """What a successful capture changes for good: first optimizer state, and plain attributes that build() set."""
    for held in owned.optimizers:
        step = traced.step
        made = [
            first
            for first in traced.declared[held.name]
            if id(first.parameter) in step.stepped and step.was_asked_for(held.name, first.parameter)
        ]
        empty: dict[Any, Any] = {
            owner: {} for optimizer, owner in step.empty_state if optimizer is held.optimizer
        }
        change_state(held.optimizer, add={first.parameter: first.entries for first in made} | empty)
    for table, name, value in traced.kept + places:
        table[name] = value


def _undoing(owned: Owned, places: list[tuple[dict[str, Any], str, Any]]) -> Callable[[], None]:
    """The rollback of `_commit`, which spares what other threads did meanwhile."""
    states = [(item.optimizer, item.optimizer.state, dict(item.optimizer.state)) for item in owned.optimizers]
    attributes = [
        (table, name, table.get(name, _ABSENT) if isinstance(table, dict) else table[name])
        for table, name, _ in places
    ]

    def undo() -> None:
        for optimizer, state, entries in states:
            if optimizer.state is state:
                change_state(optimizer, add=entries, drop=[owner for owner in state if owner not in entries])
            else:
                optimizer.state = state
        for table, name, value in reversed(attributes):
            if value is not _ABSENT:
                table[name] = value
            else:
                table.pop(name, None)

    return undo
