"""What one trace leaves in Python objects: numbers that move, lists that it adds to, tensors that it stores there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from monograph.capture.effects.foreign_objects import Effects
from monograph.capture.effects.python_objects.changed_numbers import (
    changed_numbers,
    check_contents,
    check_forms,
    numbers_put,
)
from monograph.capture.effects.python_objects.counters import Counters, is_number
from monograph.capture.effects.python_objects.growth import Grown, collect_constant_growth, collect_growth
from monograph.capture.effects.python_objects.number_places import Place, is_known, value_before
from monograph.capture.effects.python_objects.records import SetRecord
from monograph.capture.effects.python_objects.stored import StoredThings, collect_stored
from monograph.capture.effects.side_effects import SideEffects
from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.sources.overlay import Overlay, real_attributes_of
from monograph.capture.guards.sources.places import Content
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads
from monograph.capture.tensors.fakes import Inputs
from monograph.ir.graph_signature import ReadAfter, Write
from monograph.ir.port import READ_OUT


class LeftInObjects:
    """Collects it, and puts back what was there. `held` are the objects whose attributes an overlay shows."""

    def __init__(
        self,
        numbers: Counters,
        inputs: Inputs,
        overlay: Overlay,
        reach: Reach,
        side_effects: SideEffects,
        held: Iterable[object],
    ) -> None:
        self._inputs, self._overlay, self._reach = inputs, overlay, reach
        self._side_effects = side_effects
        self._held = list(held)
        self.numbers = numbers  # those that move while this trace runs
        self.writes: list[Write] = []  # what they become, and others that come from them
        self.overwritten: list[Place] = []  # plain numbers before the step, moving ones after it
        self.grown = Grown([], [], [])  # lists that this step only adds to
        self.stored = StoredThings()  # tensors in objects outside

    def collect(self, reads: Reads, covered: Set[int], micro_batches: int = 1) -> None:
        """To be called when the step has run. `covered` are the ids of the containers that others put back.

        With several micro-batches only what they all do alike is taken; the rest stays, and is refused.
        """
        if micro_batches > 1:
            self.grown = collect_constant_growth(self._reach, reads, self._overlay, micro_batches)
            return
        outputs = self._side_effects.state_outputs
        found = self._numbers_written(reads)
        put = list(self._side_effects.values.only_put(reads))
        self.grown = collect_growth(self._reach, reads, self._inputs, self._overlay, self._written, put)
        carried = self._side_effects.tensors.carried
        carried.update(item.label for item in self.grown.found if isinstance(item, SetRecord))
        outputs += self.grown.state_outputs
        self.stored = collect_stored(
            self._reach.sources,
            covered - self._side_effects.tensors.not_carried(reads),
            self._inputs,
            self._overlay,
            self._side_effects.tensors.share_memory,
            self._written,
        )
        if self.numbers.places:
            anew = [stored.source for stored in self.stored.found]
            check_contents(self._reach.sources, self.numbers, anew)
        outputs += self.stored.state_outputs
        self._side_effects.known_elsewhere |= self.stored.tensors()
        self.writes = found + self.grown.writes + self.stored.writes
        leaves = [leaf for write in self.writes if write.moves for leaf in write.value.leaves]
        for leaf in dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, ReadAfter)):
            tensor = self._inputs.read_out[leaf.name]
            outputs.append(StateOutput(tensor, leaf, f"{READ_OUT}{leaf.name}"))

    def place(self, positions: Mapping[int, int]) -> None:
        """Inputs of the program have got other positions, since some are gone."""
        self.writes = [
            replace(write, value=write.value.placed(positions)) if write.moves else write
            for write in self.writes
        ]

    def _numbers_written(self, reads: Reads) -> list[Write]:
        """Numbers that move, and that build() has left there."""
        check_forms(self._reach.sources, self.numbers)
        found = self.numbers.collect(self._inputs, self._overlay)
        for table, name, label, value in self._side_effects.values.new_numbers(reads):
            found.append(self._written(table, name, label, value))
        self._reach.take_imports()
        self._reach.drop_forgotten()
        for source, place, value in numbers_put(self._reach.sources, self._overlay, self.numbers):
            if not self.numbers.can_be_written(self._inputs, value):
                continue  # of a trace that failed, which the user has kept
            found.append(self.numbers.written(self._inputs, place, value))
            before = value_before(source, place)
            if is_number(before):
                self.overwritten.append(place)
            if isinstance(source, Content):
                place.container[place.key] = before
            else:
                source.restore(place.key, before)
        return found

    def _written(self, container: Any, key: Any, label: str, value: Any) -> Write:
        return self.numbers.written(self._inputs, Place(container, key, container, label), value)

    def changed(self, reads: Reads, effects: Effects) -> list[Place]:
        """The places where this trace has changed one number into another."""
        attributes = [
            Place(table, name, table, label)
            for label, owner, name in self._side_effects.values.changed_numbers(reads)
            if (table := real_attributes_of(owner)) is not None
        ]
        return changed_numbers(effects, [*self._with_owners(attributes), *self.overwritten])

    def moved(self, places: Iterable[Place]) -> list[Place]:
        """Of places whose numbers have changed since some build was made those of this step."""
        return self._with_owners(place for place in places if is_known(place, self._reach.sources))

    def _with_owners(self, places: Iterable[Place]) -> list[Place]:
        held = {id(real_attributes_of(owner)): owner for owner in self._held}
        return [replace(place, owner=held.get(id(place.container))) for place in places]
