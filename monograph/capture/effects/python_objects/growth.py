"""Lists that a step makes longer and does not read: what they contain is not guarded, and what it adds is added at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monograph.capture.effects.attribute_tensors import was_there
from monograph.capture.effects.attributes import Changed, table_of
from monograph.capture.effects.containers import objects_in
from monograph.capture.effects.python_objects.list_places import freed
from monograph.capture.effects.python_objects.number_places import Place
from monograph.capture.effects.python_objects.only_added import HOLDERS, is_only_added_to, way_to
from monograph.capture.effects.python_objects.records import (
    Record,
    SetRecord,
    Written,
    changeable,
    has_memory,
    is_new_tensor,
    is_record,
    record_of,
)
from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.places import Content, Source
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads
from monograph.capture.guards.sources.values import is_immutable
from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.tensors import storage_key
from monograph.ir.graph_signature import Assign, Write


@dataclass(frozen=True)
class Growth:
    """What a step adds to the list that is in a place. Those of `items` that the step computes come there when it has run.

    Where a container or an object is added, `records` has it. Each of the micro-batches of a step adds the same.
    """

    label: str
    place: Place
    items: list[Any]
    computed: frozenset[int]
    records: Mapping[int, Record]
    micro_batches: int = 1

    @property
    def content(self) -> list[Any]:
        """The list that is there now."""
        found: list[Any] = self.place.value
        return found

    def apply(self) -> None:
        """As after the step."""
        for index, record in self.records.items():
            self.items[index] = record.made()
        list.extend(self.content, self.items * self.micro_batches)
        for index in self.computed:
            self.items[index] = None

    def objects(self) -> Iterator[Any]:
        """What it changes, and what it puts there."""
        yield self.content
        yield from objects_in(self.items)
        yield from objects_in(leaf for record in self.records.values() for leaf in record.leaves)


def grown_lists(reach: Reach, reads: Reads) -> Iterator[tuple[Content, list[Any]]]:
    """The lists that only grew, each with what was added, if the step could read none of what they hold."""
    for source in reach.sources:
        if isinstance(source, Content) and type(source.content) is list:
            before, now = list(source.recorded.values()), list(source.content)
            kept = all(a is b for a, b in zip(before, now, strict=False))
            if kept and len(now) > len(before) and is_only_added_to(source.content, reach, reads):
                yield source, now[len(before) :]


def _idle_beside(grown: Iterable[Content], reach: Reach, reads: Reads) -> Iterator[list[Any]]:
    """The lists that dicts and lists hold beside these, which have not grown in this step, and which it does not read either."""
    known = {id(source.content) for source in grown}
    holders = [holder for source in grown for holder in way_to(source.content, reach).holders]
    while holders:
        holder = holders.pop()
        if id(holder) in known:
            continue
        known.add(id(holder))
        if type(holder) is list and is_only_added_to(holder, reach, reads):
            yield holder
        else:
            items = holder.values() if isinstance(holder, dict) else holder
            holders += [item for item in items if type(item) in HOLDERS]


@dataclass
class Grown:
    """What one trace has added to lists, and where what it computes for them comes from."""

    found: list[Growth | SetRecord]
    state_outputs: list[StateOutput]
    writes: list[Write]
    idle: list[list[Any]] = field(
        default_factory=list
    )  # beside those lists, and neither read nor made longer

    def add_record(self, change: Changed, written: Written) -> None:
        """One attribute more that each step sets to a container or an object."""
        record, writes, outputs = record_of(change.value, change.path, written)
        self.found.append(SetRecord(change.path, table_of(change.owner), change.name, record))
        self.writes += writes
        self.state_outputs += outputs

    def release(self, sources: Iterable[Source], *, replaceable: bool) -> list[Source]:
        """The sources without those lists. If they are `replaceable`, other lists may take their places."""
        found = [item.content for item in self.found if isinstance(item, Growth)]
        lists = {id(item): item for item in (*found, *self.idle)}
        kept = [s for s in sources if not (isinstance(s, Content) and id(s.content) in lists)]
        if lists and replaceable:
            kept, places = freed(kept, lists)
            self.found = [_placed(item, places) for item in self.found]
        return kept


def _only(source: Content) -> Place:
    """The place of a list that is always that one."""
    return Place([source.content], 0, source.content, source.label)


def _placed(item: Growth | SetRecord, places: Mapping[int, Place]) -> Growth | SetRecord:
    """The same, of whatever list is in that place."""
    return replace(item, place=places.get(id(item.content), item.place)) if isinstance(item, Growth) else item


def collect_growth(
    reach: Reach, reads: Reads, inputs: Inputs, overlay: Overlay, written: Written, put: Sequence[Changed]
) -> Grown:
    """Take what was added out of the lists again. `written` makes the write of a number that moves.

    `put` are attributes that the step sets to a container or an object, and does not read.
    """
    longer = list(grown_lists(reach, reads))
    grown = Grown([], [], [], list(_idle_beside([source for source, _ in longer], reach, reads)))
    given = [*(item.fake for item in inputs.items), *inputs.by_real.values()] if longer or put else []
    own = {storage_key(item) for item in given if has_memory(item)}
    places = Counter(changeable([*(item for _, added in longer for item in added), *(c.value for c in put)]))
    shared = {item for item, count in places.items() if count > 1}  # one object at two places would be two
    known = reach.containers if longer or put else set()
    for change in put:
        if (
            is_record(change.value, own)
            and not was_there(change.value, known)
            and shared.isdisjoint(changeable([change.value]))
        ):
            grown.add_record(change, written)
    for source, added in longer:
        content = source.content
        if overlay.of(content) is not content or any(not _can_be_added(item, own, known) for item in added):
            continue
        if not shared.isdisjoint(changeable(added)):
            continue
        values: list[Any] = list(added)
        records: dict[int, Record] = {}
        computed = frozenset(at for at, item in enumerate(added) if not is_immutable(item))
        for at in computed:
            label = f"{source.label}[{len(source.recorded) + at}]"
            if is_moving(added[at]):
                grown.writes.append(written(values, at, label, added[at]))
            elif is_record(added[at], own):
                records[at], writes, outputs = record_of(added[at], label, written)
                grown.writes += writes
                grown.state_outputs += outputs
            else:
                item = added[at]
                grown.state_outputs.append(
                    StateOutput(item.detach(), Assign(values, at, item.requires_grad), label)
                )
            values[at] = None
        grown.found.append(Growth(source.label, _only(source), values, computed, records))
        del content[len(content) - len(added) :]
    return grown


def collect_constant_growth(reach: Reach, reads: Reads, overlay: Overlay, micro_batches: int) -> Grown:
    """Take what a micro-batch added out of the lists to which it added constants alone: the others add the same."""
    longer = list(grown_lists(reach, reads))
    grown = Grown([], [], [], list(_idle_beside([source for source, _ in longer], reach, reads)))
    for source, added in longer:
        content = source.content
        if overlay.of(content) is content and all(map(is_immutable, added)):
            grown.found.append(
                Growth(source.label, _only(source), added, frozenset(), {}, micro_batches=micro_batches)
            )
            del content[len(content) - len(added) :]
    return grown


def _can_be_added(item: Any, own: set[int], known: set[int]) -> bool:
    """True for plain values, and for new numbers and tensors that nothing else shows, by themselves or in a record."""
    if is_immutable(item) or is_moving(item) or is_new_tensor(item, own):
        return True
    return is_record(item, own) and not was_there(item, known)
