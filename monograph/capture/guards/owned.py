"""Guards on what a step updates: param groups and state of optimizers, a loss scaler, averages of weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from monograph.capture.guards.identities import identities
from monograph.capture.guards.optimizers import (
    guarded_values,
    labelled_group_values,
    labelled_state_values,
    only_tensors,
    owner_name,
    state_entries,
)
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.slots import layout_of
from monograph.capture.guards.sources.values import ABSENT
from monograph.capture.guards.words import place_of_length, place_of_version, words_reader
from monograph.compat.amp import scaler_values
from monograph.compat.modules import global_hooks
from monograph.compat.optimizers import OPTIMIZER_HOOK_FIELDS
from monograph.compat.tensors import WORD
from monograph.ir.graph_signature import Number
from monograph.state.find import Owned, RegisteredOptimizer, WeakModules, tensor_paths
from monograph.state.signals import held_back
from monograph.state.swap import NOTHING_REPLACED, Swap

_STATE, _GROUPS = "state", "groups"
_NONE = {"": ABSENT}  # in place of state that is not there
_RESTLESS = 3  # moves of dicts to equal content after which their versions are no longer looked at


class OwnedGuards:
    """The objects in optimizers, their hooks, the scaler and averages. `hold()` is true while all are the same.

    State that is all tensors is in many dicts, which no replay moves: as long as their versions stand, it is not
    looked into. So it is with param groups, until a scheduler has moved their numbers a few times. If `covers_all`, the
    words at `places`, the `roots` and the `items` of `lists` show all.
    """

    def __init__(
        self,
        owned: Owned,
        counters: Iterable[Number],
        owners: Mapping[str, Sequence[Any] | None],
        own: Sequence[OwnPlace] = (),
    ) -> None:
        """`owners` are those whose state the step asks for, by optimizer; None for all that there are.

        `own` are the places where each step puts a new tensor.
        """
        self._own = tuple(own)
        self._owned = replace(owned, modules=WeakModules(owned.modules))
        self._optimizers, self._owners = owned.optimizers, owners
        self._scaler, self._averages = owned.scaler, owned.averages
        self._counters = frozenset((id(number.container), number.key) for number in counters)
        self._counter_paths = {
            f"{registered.name}/group{index}/{key}"
            for registered in owned.optimizers
            for index, group in enumerate(registered.optimizer.param_groups)
            for key in group
            if (id(group), key) in self._counters
        }
        names = tensor_paths(owned.named_modules())
        self._owner_names = {
            name: None if known is None else [owner_name(owner, names) for owner in known]
            for name, known in owners.items()
        }
        self._in_dicts = {
            registered.name
            for registered in owned.optimizers
            if all(map(only_tensors, self._entries(registered)))
        }
        hooks = [
            registered.optimizer.__dict__[name]
            for registered in self._optimizers
            for name in OPTIMIZER_HOOK_FIELDS
        ]
        hooks += global_hooks()
        self._empty = [table for table in hooks if not table]
        self._hooks = [table for table in hooks if table]
        self._moves = {_STATE: 0, _GROUPS: 0}
        self.roots: list[
            tuple[Any, Any, Any]
        ] = []  # optimizers, their state, and the list of their param groups
        self.lists: list[list[Any]] = []
        self.items: list[Any] = []
        self.settle()

    def layout(self) -> dict[str, Any]:
        """What is where now."""
        return layout_of(self._owned, self._owner_names, self._counter_paths, self._own)

    def bind(self, swap: Swap) -> None:
        """Know the objects that have taken the place of others."""
        self._counters = frozenset(
            (id(swap.new[place]) if place in swap.new else place, key) for place, key in self._counters
        )
        self._owners = {
            name: None if known is None else list(map(swap.of, known)) for name, known in self._owners.items()
        }

    def settle(self) -> None:
        """Take the present objects as those that must be there."""
        self._watch()
        self._expected = self._gather(whole=True)  # alive, so that no address is given twice
        self._identities = identities(self._expected)
        self._apart = identities(self._gather(whole=False))

    def hold(self) -> bool:
        """True if no object was replaced."""
        try:
            return not any(self._empty) and (self._versions_hold() or self._entries_hold())
        except (KeyError, AttributeError):  # an attribute is gone
            return False

    def rest_holds(self) -> bool:
        """True if no object was replaced that `words` would not show."""
        try:
            return not any(self._empty) and identities(self._gather(whole=False)) == self._apart
        except (KeyError, AttributeError):
            return False

    def _versions_hold(self) -> bool:
        return self.words is not None and self._read_words() == self.words and self.rest_holds()

    def _entries_hold(self) -> bool:
        if identities(self._gather(whole=True)) != self._identities:
            return False
        if self.words is None:
            return True
        now, num_states = self._read_words(), len(self._tables) * WORD
        self._moves[_STATE] += now[:num_states] != self.words[:num_states]
        self._moves[_GROUPS] += now[num_states:] != self.words[num_states:]
        with held_back():
            self._watch()
            self._apart = identities(self._gather(whole=False))
        return identities(self._gather(whole=True)) == self._identities

    def _watch(self) -> None:
        """Note the versions of the dicts. Only then their entries are looked at: a later change moves a version."""
        there = [registered for registered in self._optimizers if registered.name in self._in_dicts]
        states: list[dict[Any, Any]] = [registered.optimizer.state for registered in there]
        self._tables: list[dict[Any, Any]] = list(chain(states, *map(self._entries, there)))  # alive
        versions = list(map(place_of_version, self._tables))
        groups = self._places_of_groups() if self._moves[_GROUPS] < _RESTLESS else None
        places = [*versions, *(groups or ())]
        known = [place for place in places if place is not None]
        self.places: Sequence[int] = ()
        if groups is None:
            self.roots, self.lists, self.items = [], [], []
        self.words: bytes | None = None  # at `places`, that show replaced objects; None if they are not known
        if self._moves[_STATE] < _RESTLESS and len(known) == len(places):
            self.places = known
            self._read_words = words_reader(known)
            self.words = self._read_words()
        self.covers_all = groups is not None and self.words is not None

    def _places_of_groups(self) -> list[int | None] | None:
        """The addresses of versions and lengths that show changes in param groups; None if there is more to look at.

        What the lists there hold is `items`, in the order of `lists`.
        """
        every = [registered.optimizer for registered in self._optimizers]
        if self._hooks or self._scaler is not None or self._averages or len(self._in_dicts) < len(every):
            return None
        groups = [group for optimizer in every for group in optimizer.param_groups]
        lists = [*(optimizer.param_groups for optimizer in every), *(group["params"] for group in groups)]
        inner = [value for group in groups for value in group.values() if type(value) is list]
        if not all(type(item) is list for item in lists) or len(inner) > len(groups):
            return None  # there are lists besides `params`, or other kinds of them
        self.roots = [(optimizer, optimizer.state, optimizer.param_groups) for optimizer in every]
        self.lists, self.items = lists, list(chain.from_iterable(lists))
        return [*map(place_of_version, groups), *map(place_of_length, (*lists, *self._empty))]

    def hooks_changed(self) -> bool:
        """True if there are hooks of optimizers or of all modules where there were none."""
        return any(self._empty)

    def _gather(self, *, whole: bool) -> list[Any]:
        values = list(chain.from_iterable(map(dict.values, self._hooks)))
        if self._scaler is not None:
            values.extend(scaler_values(self._scaler).values())
        for average in self._averages:
            values.extend(average.weights.values())
        for registered in self._optimizers:
            values.extend(guarded_values(registered, self._counters))
            values.extend(self._state(registered, whole=whole))
        return values

    def _entries(self, registered: RegisteredOptimizer) -> Collection[dict[str, Any]]:
        """The state of the owners that the step asks for."""
        state, owners = registered.optimizer.state, self._owners.get(registered.name)
        return state.values() if owners is None else [state.get(owner, _NONE) for owner in owners]

    def _state(self, registered: RegisteredOptimizer, *, whole: bool) -> Iterable[Any]:
        if registered.name not in self._in_dicts:
            return chain.from_iterable(map(state_entries, self._entries(registered)))
        return (
            chain.from_iterable(map(dict.values, self._entries(registered)))
            if whole
            else (registered.optimizer.state,)
        )

    def labelled(self, swap: Swap = NOTHING_REPLACED) -> Iterator[tuple[str, Any]]:
        """The same objects by label, for messages; of owners what has taken their place."""
        for index, value in enumerate(chain.from_iterable(map(dict.values, self._hooks))):
            yield f"hook {index}", value
        for name, value in scaler_values(self._scaler).items():
            yield f"scaler.{name}", value
        for average in self._averages:
            for name, tensor in average.weights.items():
                yield f"ema/{average.path}/{name}", tensor
        names = tensor_paths(self._owned.named_modules())
        for registered in self._optimizers:
            yield from labelled_group_values(registered, self._counters)
            owners = self._owners.get(registered.name)
            for owner in registered.optimizer.state if owners is None else map(swap.of, owners):
                path = f"{registered.name}/{owner_name(owner, names)}"
                yield from labelled_state_values(path, registered.optimizer.state.get(owner, _NONE))
