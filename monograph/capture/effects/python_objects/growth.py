"""Lists that a step makes longer and does not read: what they contain is not guarded, and what it adds is added at each step.

That a list is not read follows from the code that ran. A list can be got at through the places that hold it. If the one
place is an attribute or a global, each piece of code that ran and spells its name must do one thing with what it finds
there: call its `append` or `extend`. If it is an entry of a dict, that holds for the name of the dict, of which each piece
of code must take one entry and add to it.
"""

from __future__ import annotations

import dis
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from monograph.capture.effects.attributes import Changed, table_of
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
from monograph.capture.guards.sources.code_names import names_of
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.places import Content, Entries, Source
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.values import is_immutable
from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.tensors import storage_key
from monograph.ir.graph_signature import Assign, Write

_NOTHING = object()
_DICTS = (dict, defaultdict)
_KEYS = frozenset({"LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL"})
# an operator since Python 3.14; no other takes one key and gives a list
_SUBSCRIPTS = frozenset({"BINARY_SUBSCR", "BINARY_OP"})
_ADDING = frozenset({"append", "extend"})
# since Python 3.12, which has the name of the old instruction, and never writes it
_METHOD_IS_A_FLAG = "LOAD_METHOD" not in {
    item.opname for item in dis.get_instructions(compile("items.append()", "", "eval"))
}
# of variables and arguments, which are no attributes
_LOCAL = ("FAST", "DEREF", "CLOSURE", "CLASSDEREF", "CELL")


@dataclass(frozen=True)
class Growth:
    """What a step adds to a list. Those of `items` that the step computes come there when it has run.

    Where a tuple, list or dict is added, `records` has it.
    """

    label: str
    content: list[Any]
    items: list[Any]
    computed: frozenset[int]
    records: Mapping[int, Record]

    def apply(self) -> None:
        """As after the step."""
        for index, record in self.records.items():
            self.items[index] = record.made()
        list.extend(self.content, self.items)
        for index in self.computed:
            self.items[index] = None


@dataclass(frozen=True)
class NewEntries:
    """Numbers that a step computes, and lists of them, under keys that a dict did not have.

    `numbers` gets them when the step has run.
    """

    content: dict[Any, Any]
    order: list[Any]  # all keys after the step
    numbers: dict[Any, Any]

    def apply(self) -> None:
        """As after the step."""
        for key, value in self.numbers.items():
            self.content[key] = list(value) if type(value) is list else value
        if list(self.content) != self.order:
            for key in filter(self.content.__contains__, self.order):
                self.content[key] = self.content.pop(key)


def grown_lists(reach: Reach) -> Iterator[tuple[Content, list[Any]]]:
    """The lists that only grew, each with what was added, if the step could read none of what they hold."""
    for source in reach.sources:
        if isinstance(source, Content) and type(source.content) is list:
            before, now = list(source.recorded.values()), list(source.content)
            kept = all(a is b for a, b in zip(before, now, strict=False))
            if kept and len(now) > len(before) and is_only_added_to(source.content, reach):
                yield source, now[len(before) :]


def is_only_added_to(content: list[Any], reach: Reach) -> bool:
    """True if all that the code which ran can have done with a list is to add to it."""
    if reach.has_iterators:
        return False
    source, name = _only_way(content, reach)
    in_dict = isinstance(source, Content) and type(source.content) in _DICTS
    if in_dict:
        source, name = _only_way(source.content, reach)
    if not isinstance(source, Entries) or source.whole or type(name) is not str:
        return False
    if name in reach.stored or name in reach.keys or name in reach.made_up:
        return False
    is_global = "__builtins__" in source.entries  # else no global name leads there
    return all(_only_adds(code, name, is_global=is_global, in_dict=in_dict) for code in reach.codes())


def _only_way(container: Any, reach: Reach) -> tuple[Any, Any]:
    """The source and the key that hold a container, if nothing else does."""
    ways = list(reach.ways.get(id(container), ()))
    return ways[0] if len(ways) == 1 and isinstance(ways[0], tuple) else (None, "")


def _only_adds(code: CodeType, name: str, *, is_global: bool, in_dict: bool) -> bool:
    names = names_of(code)
    if name not in names.attributes | names.globals | names.stored | names.imports:
        return True
    instructions = [item for item in dis.get_instructions(code) if item.opname != "CACHE"]
    return all(
        _is_harmless(item, instructions[at + 1 : at + 4], name, in_dict=in_dict)
        for at, item in enumerate(instructions)
        if is_global or item.opname not in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def _is_harmless(
    item: dis.Instruction, following: list[dis.Instruction], name: str, *, in_dict: bool
) -> bool:
    """True if an instruction does not look for the name, calls what it finds, or has it added to."""
    if item.opname in ("LOAD_CONST", "RETURN_CONST"):
        return name not in str(item.argval)  # a text may spell it in many ways
    if item.argval != name or any(kind in item.opname for kind in _LOCAL) or item.opname == "KW_NAMES":
        return True
    if _is_called(item):  # a list is not callable
        return True
    found = item.opname == "LOAD_ATTR" or (item.opname == "LOAD_GLOBAL" and not (item.arg or 0) & 1)
    if in_dict:
        if len(following) < 3 or following[0].opname not in _KEYS or following[1].opname not in _SUBSCRIPTS:
            return False
        following = following[2:]
    return found and bool(following) and _is_called(following[0]) and following[0].argval in _ADDING


def _is_called(item: dis.Instruction) -> bool:
    """True if an attribute is loaded as a method, which is then called."""
    return item.opname == "LOAD_METHOD" or (
        _METHOD_IS_A_FLAG and item.opname == "LOAD_ATTR" and bool((item.arg or 0) & 1)
    )


@dataclass
class Grown:
    """What one trace has added to lists and dicts, and where what it computes for them comes from."""

    found: list[Growth | NewEntries | SetRecord]
    state_outputs: list[StateOutput]
    writes: list[Write]

    def add_record(self, change: Changed, written: Written) -> None:
        """One attribute more that each step sets to a list, tuple or dict."""
        record, writes, outputs = record_of(change.value, change.path, written)
        self.found.append(SetRecord(change.path, table_of(change.owner), change.name, record))
        self.writes += writes
        self.state_outputs += outputs

    def release(self, sources: Iterable[Source]) -> list[Source]:
        """The sources without those lists."""
        grown = {id(growth.content) for growth in self.found if isinstance(growth, Growth)}
        return [s for s in sources if not (isinstance(s, Content) and id(s.content) in grown)]


def collect_growth(
    reach: Reach, inputs: Inputs, overlay: Overlay, written: Written, put: Sequence[Changed]
) -> Grown:
    """Take what was added out of the lists again. `written` makes the write of a number that moves.

    `put` are attributes that the step sets to a list, tuple or dict, and does not read.
    """
    grown = Grown([], [], [])
    _take_new_entries(reach, overlay, written, grown)
    longer = list(grown_lists(reach))
    given = [*(item.fake for item in inputs.items), *inputs.by_real.values()] if longer or put else []
    own = {storage_key(item) for item in given if has_memory(item)}
    places = Counter(changeable([*(item for _, added in longer for item in added), *(c.value for c in put)]))
    shared = {item for item, count in places.items() if count > 1}  # one object at two places would be two
    for change in put:
        if is_record(change.value, own) and shared.isdisjoint(changeable([change.value])):
            grown.add_record(change, written)
    for source, added in longer:
        content = source.content
        if overlay.of(content) is not content or not all(_can_be_added(item, own) for item in added):
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
        grown.found.append(Growth(source.label, content, values, computed, records))
        del content[len(content) - len(added) :]
    return grown


def _take_new_entries(reach: Reach, overlay: Overlay, written: Written, grown: Grown) -> None:
    for source in reach.sources:
        content = source.content if isinstance(source, Content) else None
        if type(content) not in _DICTS or overlay.of(content) is not content:
            continue
        names = {id(value) for key, value in source.recorded.items() if key[1] == 0}
        new = {key: value for key, value in content.items() if _is_new(value) and id(key) not in names}
        if new and all(map(is_immutable, new)):
            added = NewEntries(content, list(content), {})
            for key, value in new.items():
                label = f"{source.label}[{key!r}]"
                grown.writes += _writes_of(added.numbers, key, label, value, written)
                del content[key]
            grown.found.append(added)


def _is_new(value: Any) -> bool:
    """True for a number that moves, and for a list of numbers that has one."""
    if type(value) is not list:
        return is_moving(value)
    return any(map(is_moving, value)) and all(is_immutable(item) or is_moving(item) for item in value)


def _writes_of(numbers: dict[Any, Any], key: Any, label: str, value: Any, written: Written) -> list[Write]:
    if type(value) is not list:
        return [written(numbers, key, label, value)]
    numbers[key] = list(value)
    return [
        written(numbers[key], at, f"{label}[{at}]", item) for at, item in enumerate(value) if is_moving(item)
    ]


def _can_be_added(item: Any, own: set[int]) -> bool:
    """True for plain values, and for new numbers and tensors that nothing else shows, by themselves or in a record."""
    return is_immutable(item) or is_moving(item) or is_record(item, own) or is_new_tensor(item, own)
