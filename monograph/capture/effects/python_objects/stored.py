"""Tensors that a step puts into objects that the graph does not hold: `acts[name] = out` in a hook.

A capture puts everything back, and each step leaves its own tensors there once it has run. What was in such a place
before is not guarded, as long as the step gave it to no function of torch: then it can have done nothing with it but to see
that it is a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.capture.effects.attribute_tensors import containers_in
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.effects.state_outputs import StateOutput, fits
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.places import Closure, Content, Entries, Source, Variable
from monograph.capture.guards.sources.values import ABSENT, Moves, is_immutable
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.fakes import is_fake
from monograph.compat.tensors import storage_key
from monograph.ir.call.tree import Tree, flatten, unflatten
from monograph.ir.graph_signature import Argument, Assign, Copy


@dataclass(frozen=True)
class _Old:
    """What was at another key, or at this one, when the step began."""

    key: Any


@dataclass(frozen=True)
class _Slot:
    """A tensor that the step computes."""

    index: int


@dataclass(frozen=True)
class _Made:
    """A value made anew of slots and of what is the same at each step."""

    tree: Tree
    leaves: tuple[Any, ...]

    def value(self, computed: list[Any]) -> Any:
        """The value for one step."""
        leaves = (computed[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves)
        return unflatten(self.tree, leaves)


@dataclass(frozen=True)
class Stored:
    """The content of a place after a step. `computed` gets the tensors when the step has run."""

    label: str
    source: Source
    content: Mapping[Any, Any]  # of a container all of it, else the entries that change
    computed: list[Any]

    def apply(self) -> None:
        """As after the step."""
        before = self.source.now()
        made = {key: self._value(item, before) for key, item in self.content.items()}
        if isinstance(self.source, Content):
            self.source.replace(made)
        else:
            for key, value in made.items():
                self.source.restore(key, value)
        self.computed[:] = [None] * len(self.computed)

    def _value(self, item: Any, before: Mapping[Any, Any]) -> Any:
        if isinstance(item, _Made):
            return item.value(self.computed)
        return before.get(item.key, ABSENT) if isinstance(item, _Old) else item


@dataclass
class StoredThings:
    """What one trace has stored, and what the program must compute for it."""

    found: list[Stored] = field(default_factory=list)
    state_outputs: list[StateOutput] = field(default_factory=list)
    _sources: list[Source] = field(default_factory=list)

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
) -> StoredThings:
    """Take tensors of the trace out of the places where the step has put them.

    `covered` are the ids of the containers that others look after. What holds tensors in another way stays.
    `share_memory` says whether tensors share memory with each other or with state.
    """
    changed = [
        (source, before, after)
        for source in sources
        if _is_ours(source, covered, overlay)
        for before, after in [_changes(source)]
        if any(map(holds_fakes, _new(before, after)))
    ]
    inside = {
        id(item)
        for _, before, after in changed
        for value in _new(before, after)
        for item in containers_in(value)
    }
    stored, own = StoredThings(), {storage_key(t) for t in _of_inputs(inputs)}
    for source, before, after in changed:
        if id(source.container()) in inside:
            continue  # what the step itself has made is stored with what holds it
        if (copies := _copies(source, before, after, inputs)) and not share_memory(
            {
                state_output.path: state_output.target.tensor
                for state_output in copies
                if isinstance(state_output.target, Copy)
            }
        ):
            stored.state_outputs += copies
            _put_back(
                source,
                before,
                [state_output.place.key for state_output in copies if state_output.place is not None],
            )
            continue
        computed: list[Any] = []
        state_outputs: list[StateOutput] = []
        content = _content(source, before, after, inputs, own, computed, state_outputs)
        if content is None:
            continue
        stored.found.append(Stored(source.label, source, content, computed))
        stored.state_outputs += state_outputs
        stored._sources.append(source)
        _put_back(source, before, content)
    return stored


def _put_back(source: Source, before: Mapping[Any, Any], keys: Iterable[Any]) -> None:
    if isinstance(source, Content):
        source.replace(before)
    else:
        for key in keys:
            source.restore(key, before.get(key, ABSENT))


def _copies(
    source: Source, before: Mapping[Any, Any], after: Mapping[Any, Any], inputs: Inputs
) -> list[StateOutput]:
    """Tensors that the step reads and puts others like them in the place of: they are written into.

    Empty if it changes anything else.
    """
    if isinstance(source, Closure):
        container: Any = source.variable
    else:
        container = source.content if isinstance(source, Content) else source.table()
    if not isinstance(container, (list, dict, deque, Variable)) or list(before) != list(after):
        return []
    found: list[StateOutput] = []
    for key, value in after.items():
        old = before[key]
        if value is old:
            continue
        made = inputs.by_real.get(id(value), value)
        if (
            id(old) not in inputs.by_real
            or not _is_plain(old)
            or not is_fake(made)
            or not fits(made, old)
            or made.requires_grad
        ):
            return []
        if isinstance(source, Content) and isinstance(container, dict):
            at = before[key[0], 0]
        else:
            at = key
        path = source.label if isinstance(source, Closure) else f"{source.label}[{at!r}]"
        found.append(StateOutput(made, Copy(old), path, OwnPlace(container, at, path)))
    return found


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


def _content(
    source: Source,
    before: Mapping[Any, Any],
    after: Mapping[Any, Any],
    inputs: Inputs,
    own: Collection[int],
    computed: list[Any],
    state_outputs: list[StateOutput],
) -> dict[Any, Any] | None:
    """How the content after the step is made; None if a part of it cannot be made again."""
    whole = isinstance(source, Content)
    places = {id(value): key for key, value in before.items()}
    content: dict[Any, Any] = {}
    for key in [*after, *(key for key in before if key not in after and not whole)]:
        value = after.get(key, ABSENT)
        if not whole and before.get(key, ABSENT) is value:
            continue
        if id(value) in places and value is not ABSENT and not is_immutable(value):
            content[key] = _Old(places[id(value)])
        elif value is ABSENT or (is_immutable(value) and not holds_fakes(value)):
            content[key] = value
        else:
            made = _made(f"{source.label}[{key!r}]", value, inputs, own, computed, state_outputs)
            if made is None:
                return None
            content[key] = made
    return content


def _made(
    label: str,
    value: Any,
    inputs: Inputs,
    own: Collection[int],
    computed: list[Any],
    state_outputs: list[StateOutput],
) -> _Made | None:
    found: list[Any] = []
    tree = flatten(value, found)
    leaves: list[Any] = []
    for leaf in found:
        if isinstance(leaf, torch.Tensor) and is_fake(leaf):
            if (real := inputs.real_of(leaf)) is not None:
                leaves.append(real)
                continue
            item = inputs.by_fake.get(id(leaf))
            argument = item.source.index if item is not None and isinstance(item.source, Argument) else None
            if argument is None and (leaf.layout is not torch.strided or storage_key(leaf) in own):
                return None  # it aliases an input
            leaves.append(_Slot(len(computed)))
            target = Assign(computed, len(computed), leaf.requires_grad, argument)
            state_outputs.append(StateOutput(leaf.detach(), target, f"{label}{len(computed) or ''}"))
            computed.append(None)
        elif is_immutable(leaf) or id(leaf) in inputs.by_real:  # a key among them
            leaves.append(leaf)
        else:
            return None
    return _Made(tree, tuple(leaves))
