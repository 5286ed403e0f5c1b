"""What a capture gives: a program bound to what it was captured from, its guards, and what undoes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from monograph.capture.effects.attribute_values import PutAgain
from monograph.capture.effects.foreign_objects import Effects, bind, refresh
from monograph.capture.effects.gradients import GradientsSeen
from monograph.capture.effects.python_objects.growth import Growth
from monograph.capture.effects.python_objects.idle_generators import without_idle_generators
from monograph.capture.effects.python_objects.records import SetRecord
from monograph.capture.effects.python_objects.stored import Stored
from monograph.capture.effects.python_objects.unread import without_unread
from monograph.capture.guards.guards import Guards
from monograph.capture.guards.offsets import Offsets
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.places import Entries, Source
from monograph.capture.guards.weak import loosened, unbound
from monograph.capture.numbers.taken import Taken
from monograph.capture.optimizers.tracing import change_state
from monograph.capture.ports import GraphSignature, taken_over
from monograph.capture.process.hooks import hooks_of
from monograph.capture.step.request import Request
from monograph.capture.step.traced_step import TracedStep
from monograph.capture.tensors.conditions import Conditions
from monograph.capture.traced import AttributeValue, Traced
from monograph.distributed.pipeline.bound import OfRank, Shares, of_this_rank, pipeline_of
from monograph.ir.call_text import ModuleCall
from monograph.ir.graph_signature import Between, BoundProgram, Number, Result
from monograph.state.find import Owned, module_slots
from monograph.state.signals import held_back
from monograph.user_code.lines import Origin

_ABSENT = object()


@dataclass(frozen=True)
class Captured(BoundProgram):
    """A program bound to what it was captured from, and its guards."""

    guards: Guards
    steps: Mapping[str, int]  # how often each optimizer steps in one call
    without_gradient: tuple[str, ...]
    gradients: GradientsSeen
    notes: tuple[str, ...]
    hooks: tuple[str, ...]
    module_io: Mapping[str, tuple[ModuleCall, ...]]  # by path; "" is build() itself
    with_values: bool  # of fakes that carried values
    mended: Mapping[Any, str]  # ops whose fake kernel reported a wrong shape, and which
    effects: Effects  # what build() changes in objects that the graph does not hold
    grown: tuple[Growth | SetRecord | Stored, ...]  # what build() adds to lists and dicts, and stores
    put_again: PutAgain  # what it only sets
    unraised: Conditions  # its branches, and that no arithmetic of the program raises: compiled code does not
    fixed: Mapping[str, Origin]  # sizes that only the present number fits, and the user's lines
    taken: Mapping[str, Taken]  # of other numbers, by their paths
    why_plain: str  # why numbers that have changed are constants in it
    own: tuple[OwnPlace, ...]  # where each step puts a new tensor
    shares: Shares  # those of the ranks of a pipeline
    literals: frozenset[int]  # the ids of inputs that torch.tensor([...]) made in the trace
    undo: Callable[[], object]  # takes first optimizer state, and attributes that build() set, away again

    def __repr__(self) -> str:
        return f"<Captured {self.program!r}>"

    def lists_grown(self) -> list[str]:
        """The lists that the step makes longer, by the names of their places."""
        return [item.label for item in self.grown if isinstance(item, Growth)]

    def places_written(self) -> set[str]:
        """Attributes, globals and entries that each step gives a value, as reasons for builds name them."""
        paths = [port.path for port in self.program.outputs]
        paths += [write.about.partition(" (")[0] for write in self.writes]
        put: dict[int, set[Any]] = {}
        for table, name, _ in self.put_again.places:
            put.setdefault(id(table), set()).add(name)
        sources = self.guards.sources if put else ()
        labels = {
            source.item_label(name) for source in sources for name in put.get(id(source.container()), ())
        }
        return labels | {place for path in paths for place in (path, f"graph.{path}")}

    def for_good(self) -> Self:
        """The same without what would undo it, which keeps the state of before alive."""
        return replace(self, undo=_nothing)

    def unbound(self) -> Self:
        """The same without what binds it to live tensors; those are held by the executor and the guards."""
        return replace(super().unbound(), undo=_nothing)


def _nothing() -> None:
    pass


def committed(
    request: Request,
    modules: Mapping[str, nn.Module],
    traced: Traced,
    signature: GraphSignature,
    own: Sequence[tuple[OwnPlace, Any]],
) -> Captured:
    """What a trace has found, bound to the state as it is from now on; where that fails, all is as before.

    `own` are the places whose tensors each step replaces, with copies for them.
    """
    attributes = traced.left.plain + [(place.container, place.key, value) for place, value in own]
    mine = of_this_rank(
        signature.program,
        pipeline_of(request.owned, modules, request.settings),
        request.call,
        taken_over(traced.step.replicas),
    )
    others = {id(slot.tensor) for slot in module_slots(modules) if slot.path in mine.shares.elsewhere}
    undo = _undoing(request.owned, attributes)
    try:
        _commit(request.owned, traced, attributes, others)
        return _bound(request, modules, traced, signature, own, mine, others, undo)
    except BaseException:
        with held_back():
            undo()
        raise


def _bound(
    request: Request,
    modules: Mapping[str, nn.Module],
    traced: Traced,
    signature: GraphSignature,
    own: Sequence[tuple[OwnPlace, Any]],
    mine: OfRank,
    others: Collection[int],
    undo: Callable[[], object],
) -> Captured:
    """What a trace has found, bound to the state as it is now. `others` are ids of parameters that other ranks update."""
    step = traced.step
    notes = (*traced.notes, *mine.notes)
    writes = (*traced.left.moving, *traced.left.made)
    mine.check_writes(writes)
    idle = {
        registered.name
        for registered in request.owned.optimizers
        if not step.optimizers.steps.get(registered.name)
    }
    bound = _bound_state(step, modules)
    sources = _guard_sources(traced, own, bound)
    step.objects.stored.release(step.inputs)
    tensors = {
        path: tensor
        for path, tensor in step.inputs.tensors().items()
        if path.partition("/")[0] not in idle and path not in mine.shares.state_elsewhere
    }
    places = tuple(place for place, _ in own)
    return Captured(
        program=mine.program,
        guards=_guards(
            request,
            modules,
            traced,
            replace(
                signature,
                program=mine.program,
                conditions=mine.conditions(signature.conditions),
                overlaps=signature.overlaps.without(mine.shares.state_elsewhere),
            ),
            sources,
            tensors,
            idle,
            (*places, *step.side_effects.kept),
            bound,
            others,
        ),
        sources=mine.sources(item.source for item in step.inputs.items if item.source != Between()),
        targets=mine.targets(signature.targets),
        writes=writes,
        results=signature.results,
        result_tree=step.side_effects.result_tree,
        changes=signature.changes,
        steps=dict(step.optimizers.steps),
        without_gradient=tuple(step.side_effects.without_gradient),
        gradients=step.rules.old_gradients.seen(),
        notes=notes,
        hooks=hooks_of(modules, tensors),
        module_io=step.module_io(),
        with_values=step.inputs.with_values,
        mended=step.inputs.mended,
        effects=step.effects,
        grown=(*step.objects.grown.found, *step.objects.stored.found),
        put_again=traced.left.put_again,
        unraised=mine.conditions(signature.unraised),
        fixed=signature.fixed,
        taken=signature.taken,
        why_plain=traced.why_plain,
        own=places,
        shares=mine.shares,
        literals=frozenset([id(step.inputs.items[position].real) for position in step.literals]),
        undo=undo,
    )


def _bound_state(step: TracedStep, modules: Mapping[str, nn.Module]) -> frozenset[int]:
    """The ids of tensors in modules that the program is bound to: the build keeps these alive until they are replaced."""
    inputs = {id(item.owner) for item in step.inputs.items if item.owner is not None}
    return frozenset(id(slot.tensor) for slot in module_slots(modules) if id(slot.tensor) in inputs)


def _guard_sources(
    traced: Traced, own: Sequence[tuple[OwnPlace, Any]], bound: frozenset[int]
) -> Sequence[Source]:
    """The places that the step has read, each with what is there from now on. `bound` are ids of state."""
    step = traced.step
    read = without_unread(step.reach, step.reads)
    read = without_idle_generators(read, step.reach, step.effects, traced.moved)
    refresh(read, step.snapshot.covered)
    places = step.side_effects.module_state.places() | {
        (id(place.container), place.key): value for place, value in own
    }
    places |= {
        (id(place.container), place.key): object() for place in step.side_effects.gone
    }  # it serves no step
    bind(read, places)
    kept = step.objects.numbers.release(read)
    kept = step.objects.grown.release(kept, replaceable=not step.reach.weak)
    kept += _unread(own, kept)
    return loosened(kept, unbound(step.reach.weak, bound), step.request.owned.owner)


def _unread(own: Sequence[tuple[OwnPlace, Any]], sources: Sequence[Source]) -> Iterator[Source]:
    """The places that the step only writes: the tensors that it writes into must be there."""
    known = {(id(source.container()), key) for source in sources for key in source.recorded}
    for place, value in own:
        if isinstance(place.container, dict) and (id(place.container), place.key) not in known:
            owner = place.path.removesuffix(f".{place.key}")
            yield Entries(owner, place.container, {place.key}, recorded={place.key: value})


def _guards(
    request: Request,
    modules: Mapping[str, nn.Module],
    traced: Traced,
    signature: GraphSignature,
    sources: Sequence[Source],
    tensors: Mapping[str, torch.Tensor],
    idle: Collection[str],
    own: Sequence[OwnPlace],
    bound: frozenset[int],
    others: Collection[int],
) -> Guards:
    """The guards of a program. `idle` are the optimizers that do not step: their state may be any, and so may that of `others`."""
    step = traced.step
    items = step.inputs.items
    counters = [i.source for i in items if isinstance(i.source, Number) and i.path in step.known_counters]
    shows_bits = any(map(_shows_bits, signature.all_results()))
    guarded, is_shared = step.functions.memory.guarded(sources, tensors.values())
    return Guards(
        request.owned,
        modules,
        guarded,
        tensors,
        signature.conditions,
        request.call,
        Offsets(
            signature.program.ops(),
            request.call,
            signature.overlaps,
            read=step.functions.asked_for_offsets or shows_bits,
        ),
        counters,
        {**_without(step.optimizers.state_owners(), others), **dict.fromkeys(idle, ())},
        once=traced.once,
        own=own,
        sparse=step.inputs.sparse,
        weak=step.reach.weak,
        bound=bound,
        is_shared=is_shared,
    )


def _without(owners: Mapping[str, list[Any] | None], others: Collection[int]) -> dict[str, list[Any] | None]:
    return {
        name: None if found is None else [item for item in found if id(item) not in others]
        for name, found in owners.items()
    }


def _shows_bits(result: Result) -> bool:
    """True for a view by another dtype: where it begins must be a multiple of that."""
    return result.live is not None and result.live.dtype is not None


def _commit(
    owned: Owned, traced: Traced, attributes: Sequence[AttributeValue], others: Collection[int]
) -> None:
    """What a successful capture changes for good: first optimizer state, and plain attributes that build() set.

    `others` are ids of parameters that other processes update: there is no state for them here.
    """
    for registered in owned.optimizers:
        made = traced.step.optimizers.made_for_good(registered)
        own = {owner: entries for owner, entries in made.items() if id(owner) not in others}
        change_state(registered.optimizer, add=own)
    for table, name, value in attributes:
        table[name] = value


def _undoing(owned: Owned, attributes: Sequence[AttributeValue]) -> Callable[[], None]:
    """The rollback of `_commit`, which spares what other threads did meanwhile."""
    states = [(item.optimizer, item.optimizer.state, dict(item.optimizer.state)) for item in owned.optimizers]
    before = [
        (table, name, table.get(name, _ABSENT) if isinstance(table, dict) else table[name])
        for table, name, _ in attributes
    ]

    def undo() -> None:
        for optimizer, state, entries in states:
            if optimizer.state is state:
                change_state(optimizer, add=entries, drop=[owner for owner in state if owner not in entries])
            else:
                optimizer.state = state
        for table, name, value in reversed(before):
            if value is not _ABSENT:
                table[name] = value
            else:
                table.pop(name, None)

    return undo
