"""Tensors and numbers that a step puts into objects that the graph does not hold: `acts[name] = out` in a hook.

A capture puts everything back, and each step leaves its own tensors there once it has run. What was in such a place
before is not guarded, as long as the step gave it to no function of torch: then it can have done nothing with it but to see
that it is a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.capture.effects.containers import containers_in, objects_in
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.effects.python_objects.records import Written
from monograph.capture.effects.python_objects.stored_content import StoredContent, kept_in, value_of
from monograph.capture.effects.state_outputs import StateOutput, fits
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.places import Closure, Content, Entries, Source, Variable
from monograph.capture.guards.sources.values import ABSENT, Moves
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.fakes import is_fake
from monograph.compat.tensors import storage_key
from monograph.ir.call.tree import LEAF, flatten, leaf_paths
from monograph.ir.graph_signature import Copy, Write


@dataclass(frozen=True)
class Stored:
    """The content of a place after a step. `computed` gets the tensors and numbers when the step has run."""

    label: str
    source: Source
    content: Mapping[Any, Any]  # of a container all of it, else the entries that change
    computed: list[Any]

    def apply(self) -> None:
        """As after the step."""
        before = self.source.now()
        made = {key: value_of(item, before, self.computed) for key, item in self.content.items()}
        if isinstance(self.source, Content):
            self.source.replace(made)
        else:
            for key, value in made.items():
                self.source.restore(key, value)
        self.computed[:] = [None] * len(self.computed)

    def objects(self) -> Iterator[Any]:
        """What it changes, and what it puts there."""
        yield self.source.container()
        yield from objects_in(kept for item in self.content.values() for kept in kept_in(item))


@dataclass
class StoredThings:
    """What one trace has stored, and what the program must compute for it."""

    found: list[Stored] = field(default_factory=list)
    state_outputs: list[StateOutput] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    shown: set[int] = field(default_factory=set)  # ids of tensors from outside that these show
    _sources: list[Source] = field(default_factory=list)

    def add(self, stored: Stored, content: StoredContent) -> None:
        """One place more, with what the program must compute for it."""
        self.found.append(stored)
        self.state_outputs += content.state_outputs
        self.writes += content.writes
        self.shown |= content.shown
        self._sources.append(stored.source)

    def tensors(self) -> set[int]:
        """The ids of tensors from outside that these places show after each step."""
        left = (item for stored in self.found for item in stored.objects())
        return self.shown | {id(item) for item in left if isinstance(item, torch.Tensor)}

    def release(self, inputs: Inputs) -> None:
        """Let the guards look at the kinds alone of tensors that the step replaces and has not looked at."""
        met = set(inputs.by_real) | {id(item.real) for item in inputs.items}
        for source in self._sources:
            for key, value in source.recorded.items():
                source.recorded[key] = _kind_of(value, met)


def _kind_of(value: Any, met: Collection[int]) -> Any:
    """In the place of a tensor that nobody looked at what any tensor is equal to; also in a plain tuple."""
    if type(value) is torch.Tensor:
        return value if id(value) in met else Moves(torch.Tensor)
    return tuple(_kind_of(item, met) for item in value) if type(value) is tuple else value


def collect_stored(
    sources: Iterable[Source],
    covered: Collection[int],
    inputs: Inputs,
    overlay: Overlay,
    share_memory: Callable[[Mapping[str, torch.Tensor]], bool],
    written: Written,
) -> StoredThings:
    """Take tensors and numbers of the trace out of the places where the step has put them.

    `covered` are the ids of the containers that others look after. What holds tensors in another way stays.
    `share_memory` says whether tensors share memory with each other or with state, `written` makes the write of a number.
    """
    changed = [
        (source, before, after)
        for source in sources
        if _is_ours(source, covered, overlay)
        for before, after in [_changes(source)]
        # lists and sets of numbers alone have one length for each build: a step that may read them is refused
        for with_numbers in [isinstance(source.container(), dict)]
        if any(holds_fakes(value, with_numbers=with_numbers) for value in _new(before, after))
    ]
    inside = {
        id(item)
        for _, before, after in changed
        for value in _new(before, after)
        for item in containers_in(value)
    }
    stored, own = StoredThings(), {storage_key(t) for t in _of_inputs(inputs)} if changed else set()
    for source, before, after in changed:
        if id(source.container()) in inside:
            continue  # what the step itself has made is stored with what holds it
        copies = list(_copies(source, before, after, inputs))
        filled = {path: tensor for copy in copies for path, tensor in copy.written.items()}
        rest = {key: value for key, value in after.items() if key not in {copy.key for copy in copies}}
        if copies and not (_refer_to(rest, before, filled.values(), inputs) or share_memory(filled)):
            stored.state_outputs += [output for copy in copies for output in copy.outputs]
            _put_back(source, before, after, {copy.key for copy in copies})
            before, after = _changes(source)
            if not any(map(holds_fakes, _new(before, after))):
                continue
        new = StoredContent(source, inputs, own, written)
        content = new.entries(before, after)
        if content is not None:
            stored.add(Stored(source.label, source, content, new.computed), new)
            _put_back(source, before, after, content.keys() | (before.keys() ^ after.keys()))
    return stored


def _put_back(
    source: Source, before: Mapping[Any, Any], after: Mapping[Any, Any], keys: Collection[Any]
) -> None:
    """What was there before under these keys; under others stays what is there now."""
    if not isinstance(source, Content):
        for key in keys:
            source.restore(key, before.get(key, ABSENT))
    elif before.keys() != after.keys():
        source.replace(before)
    else:
        source.replace({key: (before if key in keys else after)[key] for key in before})


@dataclass(frozen=True)
class _Copies:
    """New tensors that are copied into those which one entry of a source has, by itself or in a list, tuple or dict."""

    key: Any
    outputs: Sequence[StateOutput]
    written: Mapping[str, torch.Tensor]  # by the paths of these


def _copies(
    source: Source, before: Mapping[Any, Any], after: Mapping[Any, Any], inputs: Inputs
) -> Iterator[_Copies]:
    """Entries whose tensors the step reads, and puts others like them in the place of: they are written into."""
    if isinstance(source, Closure):
        container: Any = source.variable
    else:
        container = source.content if isinstance(source, Content) else source.table()
    if not isinstance(container, (list, dict, deque, Variable)):
        return
    if isinstance(source, Content) and list(before) != list(after):
        return
    moved = [leaf for value in _new(before, after) for leaf in _leaves(value) if _is_plain(leaf)]
    for leaf in moved:  # from another place: that is read
        inputs.fake(leaf)
    for key, value in after.items():
        if value is (was := before.get(key, ABSENT)):
            continue
        in_dict = isinstance(source, Content) and isinstance(container, dict)
        at = before[key[0], 0] if in_dict else key
        path = source.label if isinstance(source, Closure) else f"{source.label}[{at!r}]"
        found, former = list[Any](), list[Any]()
        tree = flatten(value, found)
        if flatten(was, former) != tree:
            continue
        leaves = [
            (inputs.by_real.get(id(leaf), leaf), real) for leaf, real in zip(found, former, strict=True)
        ]
        new = {
            index: (leaf, real)
            for index, (leaf, real) in enumerate(leaves)
            if leaf is not inputs.by_real.get(id(real), real)
        }
        if all(_can_be_copied(leaf, real, inputs) for leaf, real in new.values()):
            indexes = None if tree == LEAF else tuple(new)
            paths = list(leaf_paths(tree, path))
            place = OwnPlace(container, at, path, indexes)
            outputs = [
                StateOutput(leaf, Copy(real), paths[index], place) for index, (leaf, real) in new.items()
            ]
            yield _Copies(key, outputs, {paths[index]: real for index, (_, real) in new.items()})


def _refer_to(
    entries: Mapping[Any, Any], before: Mapping[Any, Any], tensors: Iterable[torch.Tensor], inputs: Inputs
) -> bool:
    """True if what a step changes among these entries is one of these tensors, as it was."""
    found = {id(item) for tensor in tensors for item in (tensor, inputs.by_real.get(id(tensor)))}
    new = [value for key, value in entries.items() if value is not before.get(key, ABSENT)]
    return any(id(leaf) in found for value in new for leaf in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    flatten(value, found)
    return found


def _can_be_copied(made: Any, old: Any, inputs: Inputs) -> bool:
    """True if `made` can be written into a tensor that the step reads."""
    is_read = id(old) in inputs.by_real and _is_plain(old)
    return is_read and is_fake(made) and fits(made, old) and not made.requires_grad


def _is_plain(item: Any) -> bool:
    return type(item) is torch.Tensor and not is_fake(item) and not item.requires_grad


def _is_ours(source: Source, covered: Collection[int], overlay: Overlay) -> bool:
    if not source.followed or id(source.container()) in covered:
        return False
    table = source.content if isinstance(source, Content) else getattr(source, "entries", None)
    if table is not None and overlay.of(table) is not table:
        return False
    return not any(map(is_fake, source.recorded.values()))


def _changes(source: Source) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The content before and after the step; attributes that the step only stores to are among it."""
    before, after = dict(source.recorded), dict(source.now())
    if isinstance(source, Entries):
        for name, value in source.overwritten.items():
            before.setdefault(name, value)
            after[name] = source.entries.get(name, ABSENT)
    return before, after


def _new(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[Any]:
    known = {id(value) for value in before.values()}
    return [value for value in after.values() if id(value) not in known and value is not ABSENT]


def _of_inputs(inputs: Inputs) -> Iterator[torch.Tensor]:
    for item in (*(item.fake for item in inputs.items), *inputs.by_real.values()):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            yield item
