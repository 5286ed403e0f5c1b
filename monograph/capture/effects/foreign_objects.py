"""What build() changes besides tensors, in objects that the graph does not hold: globals, closures, other objects.

A capture changes nothing, so each change is undone, and done again once the step has run, as eager does.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final

from monograph.capture.effects.containers import objects_in
from monograph.capture.effects.held_fakes import caches_of_libraries, holds_numbers_alone
from monograph.capture.guards.objects import differences
from monograph.capture.guards.sources.hidden import Probe
from monograph.capture.guards.sources.libraries import is_tracing
from monograph.capture.guards.sources.places import Content, Entries, Kind, Source
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.values import ABSENT, is_immutable, same
from monograph.compat.fakes import is_fake
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import CaptureError
from monograph.state.threads import alone

# what to write where each micro-batch would change a number or a container of Python
BY_HAND: Final = (
    "let a number be a buffer: self.register_buffer('n', torch.zeros(())) and self.n.add_(1); put what is in lists, dicts and other "
    "objects there after the step, from what it returns; or accumulate by hand, with config.keep_gradients()"
)


@dataclass(frozen=True)
class Effect:
    """A place that build() changed, with its content before and after."""

    label: str
    source: Source
    before: Mapping[Any, Any]
    after: Mapping[Any, Any]

    def apply(self) -> None:
        """As after the step."""
        if isinstance(self.source, Content):
            self.source.change(self.before, self.after)
            return
        for key in [*self.after, *(key for key in self.before if key not in self.after)]:
            value = self.after.get(key, ABSENT)
            if self.before.get(key, ABSENT) is not value:
                self.source.restore(key, value)

    def objects(self) -> Iterator[Any]:
        """What it changes, and what it puts there."""
        yield self.source.container()
        yield from objects_in([*self.before.values(), *self.after.values()])

    @property
    def goes_on(self) -> bool:
        """True if build() has read what it changed, so that once more gives something else."""
        changed = {*self.before, *self.after}
        return any(
            key in self.source.recorded and self.before.get(key, ABSENT) is not self.after.get(key, ABSENT)
            for key in changed
        ) or isinstance(self.source, Content)

    @property
    def repeatable(self) -> bool:
        """True if a replay does what eager would do: the new content is made of numbers, texts and what was there."""
        known = set(map(id, self.before.values()))
        return all(id(value) in known or is_immutable(value) for value in self.after.values())


@dataclass
class Effects:
    """The changes of one trace. `lost` cannot be undone or repeated, `held` are places that got tensors of the trace."""

    found: list[Effect] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    waiting: list[Effect] = field(default_factory=list)  # to be put back by what it draws from, if at all
    held: list[str] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)  # of `held` those that got numbers and no tensors
    deques: set[str] = field(default_factory=set)  # of `held`

    def hold(self, label: str, values: Iterable[Any], *, is_deque: bool = False) -> None:
        """A place that got these values of the trace."""
        self.held.append(label)
        if is_deque:
            self.deques.add(label)
        if all(map(holds_numbers_alone, values)):
            self.numbers.add(label)

    @property
    def once(self) -> list[str]:
        """What only a new capture does again."""
        return self.lost + [effect.label for effect in self.found if not effect.repeatable]

    def apply(self) -> None:
        """All of them."""
        for effect in self.found:
            effect.apply()


def check_repeatable(effects: Iterable[Effects], doing: str) -> None:
    """Raise CaptureError for what no capture can put back, where the step is captured more often than it runs.

    `doing` is who does so, and whether it has: the beginning of a sentence.
    """
    if lost := next((label for item in effects for label in item.lost), ""):
        raise CaptureError(
            f"{doing}, and build() changes {lost}, which cannot be put back",
            hint="draw before the step, and pass what was drawn as an argument; random.Random, NumPy's generators and "
            "iterators over lists can be put back",
        )


def check_micro_batches_alike(effects: Effects, moved: Iterable[str] = ()) -> None:
    """Raise CaptureError for what a later micro-batch would find otherwise than the first: the step is captured for one.

    `moved` are the generators of Python and NumPy that the step draws from.
    """
    found = [effect.label for effect in effects.found if effect.goes_on]
    if label := next(iter([*found, *effects.lost, *moved]), ""):
        raise not_alike(label, BY_HAND)


def not_alike(label: str, hint: str) -> CaptureError:
    """The error for what a later micro-batch would find otherwise than the first."""
    return CaptureError(
        f"build() reads and changes {label}: with gradient accumulation the second micro-batch would find another "
        "value than the first",
        hint=hint,
    )


def undo_effects(reach: Reach, covered: Collection[int], is_traced: Callable[[Any], bool]) -> Effects:
    """Put everything back as it was before the code ran that could read it; gives what had changed.

    `covered` are the ids of the containers that others put back; `is_traced` says what holds tensors of the trace.
    Sources that changed and are in an object that is forgotten are no place outside of the step: they are taken out.
    What functions of libraries have put into their caches stays there: they would give the same again.
    """
    sources, caches = reach.sources, caches_of_libraries(reach.caches)
    effects, forgotten = Effects(), list[Source]()
    for source in sources:
        kept = id(source.container()) in covered
        if kept and (not isinstance(source, Content) or source.is_registry):
            continue
        if not (source.followed or isinstance(source, Kind)):
            continue
        if kept and any(map(is_traced, source.now().values())):
            continue  # it holds state of the graph, or new values for it
        if not kept and any(map(is_fake, source.recorded.values())):
            continue  # an object that the step itself has made
        _forget_the_trace(source)
        first = next(differences(source), None)
        if first is not None and reach.is_forgotten(source):
            forgotten.append(source)
            continue
        in_cache = isinstance(source, Content) and id(source.content) in caches
        if first is not None and in_cache and not any(map(is_traced, source.now().values())):
            source.recorded = dict(source.now())
        elif first is not None:
            _undo(source, source.item_label(first[1]), effects, is_traced)
        if isinstance(source, Entries):
            _undo_stores(source, effects, is_traced)
    _lose_what_waits(effects)
    sources[:] = [source for source in sources if not any(source is item for item in forgotten)]
    return effects


def _lose_what_waits(effects: Effects) -> None:
    """Of what could not be put back by itself, some has come back with what it draws from: `zip(a, b)` with its iterators.

    What has not goes on from where it is, and takes those with it that it draws from.
    """
    lost = [effect for effect in effects.waiting if next(differences(effect.source), None) is not None]
    inside, pending = set[int](), [getattr(effect.source, "owner", None) for effect in lost]
    while pending:
        for item in gc.get_referents(pending.pop()):
            if id(item) not in inside and hasattr(type(item), "__next__"):
                inside.add(id(item))
                pending.append(item)
    for effect in [item for item in effects.found if id(getattr(item.source, "owner", None)) in inside]:
        effect.apply()
        effects.found.remove(effect)
        lost.append(effect)
    for effect in lost:
        effect.source.recorded = dict(effect.source.now())
        effects.lost.append(effect.label)
    effects.waiting.clear()


def _forget_the_trace(source: Source) -> None:
    """What the trace itself had put there when that was recorded it has taken away again."""
    for key in [key for key, value in source.recorded.items() if is_of_trace(value)]:
        source.recorded[key] = now = source.now().get(key, ABSENT)
        if now is ABSENT and isinstance(source, Content):  # of a dict, with its name
            for gone in (key, (key[0], 0)) if isinstance(key, tuple) else (key,):
                source.recorded.pop(gone, None)


def _undo_stores(source: Entries, effects: Effects, is_traced: Callable[[Any], bool]) -> None:
    """Entries that the step only gives values."""
    for name, value in source.overwritten.items():
        present = source.entries.get(name, ABSENT)
        if present is value or name in source.recorded or is_of_trace(value) or same(value, present):
            continue
        if not alone() and not is_traced(present):
            continue
        source.restore(name, value)
        label = source.item_label(name)
        if is_traced(present):
            effects.hold(label, [present])
        else:
            effects.found.append(Effect(label, source, {name: value}, {name: present}))


def _undo(source: Source, label: str, effects: Effects, is_traced: Callable[[Any], bool]) -> None:
    before, after = dict(source.recorded), dict(source.now())
    changed = [value for key, value in after.items() if before.get(key, ABSENT) is not value]
    if not alone() and not any(map(is_traced, changed)):
        return  # it may be the doing of another thread, and stays; if build() did it, the next call captures anew
    if not source.replace(before):
        if isinstance(source, Probe):
            effects.waiting.append(Effect(label, source, before, after))
        else:
            effects.lost.append(label)
    elif any(map(is_traced, changed)):
        is_deque = isinstance(source, Content) and isinstance(source.content, deque)
        effects.hold(source.label if is_deque else label, filter(is_traced, changed), is_deque=is_deque)
    else:
        effects.found.append(Effect(label, source, before, after))


def refresh(sources: Iterable[Source], covered: Collection[int]) -> None:
    """Record anew what others have put back, and what the trace itself had replaced."""
    for source in sources:
        if (
            not source.followed
            or id(source.container()) in covered
            or any(map(is_of_trace, source.recorded.values()))
        ):
            names = source.recorded if isinstance(source, Entries) else ()
            source.recorded = {name: ABSENT for name in names if source.recorded[name] is ABSENT}
            source.recorded.update(source.now())


def bind(sources: Iterable[Source], bound: Mapping[tuple[int, Any], Any]) -> None:
    """Record the tensors that a program is bound to, by the id of their dict and their name there.

    Another thread may have put others in their places since the trace began: then the build serves no step.
    """
    for source in sources:
        table = source.table() if not isinstance(source, Content) else source.content
        for key, value in list(source.recorded.items()):
            if isinstance(source, Content):
                is_entry = isinstance(key, tuple) and key[1] == 1
                name = source.recorded.get((key[0], 0)) if is_entry else key
            else:
                name = key
            tensor = bound.get((id(table), name))
            if tensor is not None and tensor is not value:
                source.recorded[key] = tensor


def is_of_trace(value: Any) -> bool:
    """True for what a trace puts in the place of something: fakes, symbols, and functions that watch."""
    if type(value) is FunctionType:
        return is_tracing(str(value.__module__))
    ours = value is not ABSENT and is_tracing(str(type(value).__module__))
    return ours or is_fake(value) or is_symbolic(value)
