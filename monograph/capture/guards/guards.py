"""Guards: what a build depends on outside of its program, checked before each call.

A guard compares the identity of an object at a known place. All places are gathered into one flat list at C
speed and compared with what capture saw; tensors are checked for metadata and storage besides. A failed check says which it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from monograph.capture.guards.flat import FlatCheck, FormCheck
from monograph.capture.guards.objects import ObjectGuards
from monograph.capture.guards.offsets import Offsets
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.owned import OwnedGuards
from monograph.capture.guards.reasons import labels_changed
from monograph.capture.guards.slots import Held, replaced, sharing, without_modules
from monograph.capture.guards.sources.places import Source
from monograph.capture.guards.sources.values import is_immutable
from monograph.capture.guards.tensors import TensorGuards, has_hooks
from monograph.capture.guards.weak import SharedObjects, present
from monograph.capture.tensors.conditions import Conditions
from monograph.compat.tensors import PointerGuard, storage_key
from monograph.ir.call.reason import Cause, Reason, caused, of_owned
from monograph.ir.call.signature import Call, Spec
from monograph.ir.graph_signature import Number
from monograph.ir.graph_signature import Source as Input
from monograph.state.find import Owned
from monograph.state.signals import held_back
from monograph.state.swap import NOTHING_REPLACED, Swap

_MANY_MISSES = 64  # after which something changes all the time, so that the flat check is in vain


class Guards:
    """The guards of one build. `hold()` is the fast check, `reasons()` names the guards that failed."""

    def __init__(
        self,
        owned: Owned,
        modules: Mapping[str, nn.Module],
        sources: Sequence[Source],
        tensors: Mapping[str, torch.Tensor],
        conditions: Conditions,
        call: Call,
        offsets: Offsets,
        counters: Iterable[Number] = (),
        owners: Mapping[str, Sequence[Any] | None] = MappingProxyType({}),
        once: Sequence[str] = (),
        own: Sequence[OwnPlace] = (),
        sparse: Mapping[str, torch.Tensor] = MappingProxyType({}),
        weak: Iterable[Any] = (),
        bound: Collection[int] = (),
        is_shared: bool = False,
    ) -> None:
        """`owners` are those whose state is guarded, by optimizer, None for all; `once` is what no replay repeats.

        `own` are the places where each step puts a new tensor, `sparse` the tensors whose parts are state, `weak` the
        objects that the step has found through weak references, `bound` the ids of state that the program holds. If
        `is_shared`, arrays among the sources share the memory of state.
        """
        self._objects = ObjectGuards(sources)
        self._can_bind = not is_shared
        self._shared = SharedObjects(weak, bound)
        self._refused = ""  # why it was not bound to what has taken the place of state
        self._modes = [(weakref.ref(module), module.training) for module in modules.values()]
        self._held = OwnedGuards(owned, counters, owners, own)
        self._once = tuple(once)
        self._tensors = TensorGuards(tensors, sparse)
        self.tensors = self._tensors.by_path
        self._conditions, self._offsets, self._constants = conditions, offsets, call.constants()
        self._misses = 0  # of the flat check, though all was as before
        self.settle()
        self._arguments = self._state_among(call)

    def settle(self) -> None:
        """Take the present values as those that must hold."""
        with held_back():
            self.flat: FlatCheck | None = None
            self._containers: frozenset[int] | None = None
            self._layout = without_modules(self._held.layout())
            self._objects.settle()
            self._held.settle()
            self._labels = self._by_label()
            self._tensors.settle()

    def replaced(self, given: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Swap | str:
        """What has taken the place of state, if nothing else has changed; else a sentence.

        `given` are the tensors that the build is given, each with one on the memory that it had.
        """
        swap = replaced(self._layout, self._held.layout())
        if isinstance(swap, str):
            return swap
        self._refused = next(self._against(swap, given), "")
        return self._refused or swap

    def _against(self, swap: Swap, given: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[str]:
        """What forbids to bind the build to other objects."""
        if self._once or self._arguments or not self._can_bind or not self._offsets.overlaps.can_bind(swap):
            yield "state was replaced that the step knows by more than its place"
        if not self._objects.can_bind(swap):
            yield (
                self._objects.changed_but(swap)
                or "state was replaced that the step reads in another place too"
            )
        labels = {label: swap.of(value) for label, value in self._labels.items()}
        yield from labels_changed(labels, self._by_label(swap))
        if self._held.hooks_changed() or any(has_hooks(tensor) for pair in swap.tensors() for tensor in pair):
            yield "hooks of a parameter or of an optimizer changed"
        moved = [path for path, tensor in self.tensors.items() if id(tensor) in swap.new]
        if (changed := self._tensors.changed(without=moved)) is not None:
            yield changed
        if sharing(swap, given):
            yield f"{', '.join(moved[:1]) or 'state'} was replaced, and shares memory with other tensors of the step"

    def bind(self, swap: Swap) -> None:
        """Bind to what has taken the place of state."""
        self._objects.bind(swap)
        self._held.bind(swap)
        self._offsets.overlaps.bind(swap)
        self._tensors.bind(swap)
        self.tensors = self._tensors.by_path
        self.settle()
        self.share([item for item in self._shared.objects if id(item) not in swap.new])

    def look_at_pointers_by(self, guard: PointerGuard) -> None:
        """Check data pointers by code that the backend has compiled."""
        self.flat = None
        self._tensors.look_at_pointers_by(guard)

    def hold_for(self, call: Call) -> bool:
        """True if nothing has changed, and the arguments of a call fit."""
        if self.flat is not None and Spec not in map(type, call.leaves):
            if self.flat.holds(call.leaves):
                return True
            self.flat = None  # for another one, if nothing has changed that counts
        return self.hold() and self.arguments_hold(call)

    def note_flat(self, call: Call, sources: Sequence[Input]) -> None:
        """From now on look in one flat check at what there is: all guards hold for this call, and so do the branches.

        `sources` are those of the inputs of the program.
        """
        if self.flat is None:
            self._make_flat(sources)
        if self.flat is not None:
            self.flat.form = FormCheck.of(call)

    def _make_flat(self, sources: Sequence[Input]) -> None:
        apart = self._offsets.apart
        if self._once or self._arguments or apart is None:
            return
        self._misses += 1
        if self._misses > _MANY_MISSES:
            return
        asked: list[Callable[[], bool]] = []
        if self._tensors.hooks:
            asked.append(self._tensors.hooks_hold)
        if self._shared.counted:
            asked.append(self._shared.hold)
        if self._tensors.sparse:
            asked.append(self._tensors.sparse_hold)
        covered = self._held.covers_all and self._conditions.are_about(
            sources, set(map(id, self._held.items))
        )
        self.flat = FlatCheck(
            self._objects,
            self._held,
            self._tensors.checks,
            self._tensors.hooks_hold,
            asked,
            apart,
            has_branches=bool(self._conditions.texts) and not covered,
        )

    def depend_on(self, conditions: Conditions) -> None:
        """Take other conditions: those of code that raises nothing where Python does."""
        self._conditions, self.flat = conditions, None

    def hold(self) -> bool:
        """True if nothing that the build depends on has changed."""
        tensors = self._tensors
        return (
            self._held.hold()
            and tensors.checks.hold()
            and tensors.hooks_hold()
            and not self._once
            and (not self._shared.counted or self._shared.hold())
            and self._objects.hold()
            and (not tensors.sparse or tensors.sparse_hold())
        )

    def hold_by_value(self) -> bool:
        """True if the values are equal, though other objects; these are taken over."""
        if not self.hold() and next(self._changed_guards(), None) is None:
            self.settle()
        return self.hold()

    @property
    def sources(self) -> Sequence[Source]:
        """What the code of the step could read in objects of Python that are still there."""
        return list(present(self._objects.sources))

    @property
    def are_loose(self) -> bool:
        """True if the step found objects through weak references that are not state: these are not kept alive."""
        return self._shared.are_loose

    @property
    def know_weakly(self) -> bool:
        """True if the step found objects through weak references: they go with what lets go of the build."""
        return self._shared.are_known

    @property
    def shared(self) -> Sequence[Any]:
        """The objects that the step has found through weak references, and that the build holds all the same."""
        return self._shared.objects

    def share(self, held: Iterable[Any]) -> None:
        """List what the build holds. Where fewer than now hold one that is known weakly, somebody let go of it."""
        # who lets go of state of the graph changes a module or an optimizer, which are looked at anyway
        state = {id(item.tensor) for item in self._layout.values() if isinstance(item, Held)}
        self._shared.share(held, state)
        self.flat = None

    def knows_container(self, item: Any) -> bool:
        """True for a container or an object that the code of the step could read outside of its arguments."""
        if self._containers is None:
            found = (source.container() for source in self.sources)
            self._containers = frozenset(id(container) for container in found if container is not None)
        return not self._containers.isdisjoint((id(item), id(getattr(item, "__dict__", item))))

    def arguments_hold(self, call: Call) -> bool:
        """True if the same arguments as at capture are state, and all are in memory as the step can take them."""
        return self._state_among(call) == self._arguments and self._offsets.hold(call)

    @property
    def shared_with_arguments(self) -> frozenset[int]:
        """The storages of state that arguments of the call share."""
        return frozenset(
            storage_key(self.tensors[path]) for _, path in self._arguments if path in self.tensors
        )

    @property
    def known_arguments(self) -> tuple[tuple[int, str], ...]:
        """The arguments that are state, or that build() found elsewhere too: the program knows them by that."""
        return self._arguments

    def _state_among(self, call: Call) -> tuple[tuple[int, str], ...]:
        return self._offsets.overlaps.state_among(call)

    def release(self) -> None:
        """Drop every reference to tensors; the guards hold no more."""
        conditions, constants = self._conditions, self._constants  # explain() lists them
        self.__dict__.clear()
        self.flat, self.tensors, self._labels, self._modes = None, {}, {}, []
        self._objects, self._held = ObjectGuards(()), OwnedGuards(Owned(None), (), {})
        self._tensors, self._shared = TensorGuards.released(), SharedObjects(())
        self._once, self._conditions, self._constants = ("its state",), conditions, constants

    def modes(self) -> list[tuple[nn.Module, bool]]:
        """The held modules, with what `training` was at capture."""
        found = ((reference(), training) for reference, training in self._modes)
        return [(module, training) for module, training in found if module is not None]

    @property
    def conditions(self) -> Conditions:
        """The branches of the capture."""
        return self._conditions

    def conditions_hold(self, inputs: Sequence[Any]) -> bool:
        """True if every recorded branch would be taken with these inputs of the program."""
        return self._conditions.hold(inputs)

    # --- the slow path: which guard? ---------------------------------------------------------------------------

    def reasons(self, inputs: Sequence[Any], call: Call) -> Iterator[Reason]:
        """The guards that fail, as sentences; none if values only changed to equal ones."""
        yield from self._changed_guards()
        others = (
            caused(self._changed_argument(call), Cause.IDENTITY),
            caused(self._offsets.reason(call), Cause.FORM),
        )
        yield from (reason for reason in others if reason is not None)
        yield from self._conditions.broken(inputs)

    def _changed_guards(self) -> Iterator[Reason]:
        for what in self._once:
            yield Reason(f"build() changes {what}, which a replay would not do", Cause.ONCE, what)
            return
        if not self._shared.hold():
            yield Reason("an object that the step knows weakly was let go, or may have been", Cause.VALUE)
            return
        yield from self._objects.changed()
        if now := list(labels_changed(self._labels, self._by_label())):
            swap = replaced(self._layout, self._held.layout())
            refused = swap if isinstance(swap, str) else self._refused
            yield from map(of_owned, [refused] if refused else now)
        if (tensor := self._tensors.changed() or self._tensors.sparse_changed()) is not None:
            yield of_owned(tensor)
        if self._held.hooks_changed():
            yield Reason("a hook of an optimizer or of all modules was registered", Cause.HOOK)
        if (hook := caused(self._tensors.hooks_changed(), Cause.HOOK)) is not None:
            yield hook

    def _changed_argument(self, call: Call) -> str | None:
        before, now = dict.fromkeys(self._arguments), dict.fromkeys(self._state_among(call))
        for index, path in [*before, *now]:
            if ((index, path) in before) != ((index, path) in now):
                gone = "no longer " if (index, path) in before else ""
                return f"argument {call.paths()[index]} is {gone}{path} itself"
        return None

    def texts(self) -> list[str]:
        """The guards on plain values and the arguments that are constants, for `explain()`."""
        arguments = [f"argument {path} = {value!r}" for path, value in self._constants]
        labelled = chain(self._objects.values(), self._labels.items())
        plain = [f"{label} = {value!r}" for label, value in labelled if is_immutable(value)]
        return [*arguments, *plain, *self._conditions.about]

    def _by_label(self, swap: Swap = NOTHING_REPLACED) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for label, value in self._held.labelled(swap):
            while label in found:  # two objects of one name have two guards
                label += "'"
            found[label] = value
        return found
