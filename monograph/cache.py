"""The builds of a graph: which fits a call, why a new one is needed, and when an old one lets go of its tensors."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from monograph.capture.effects.foreign_objects import check_repeatable
from monograph.capture.effects.gradients import GradientsSeen
from monograph.capture.effects.python_objects.changed_numbers import moved_numbers
from monograph.capture.effects.python_objects.number_places import Place
from monograph.capture.guards.own_places import OwnPlaces
from monograph.capture.guards.sources.stores import lines_that_store
from monograph.capture.trace import outside_of_traces
from monograph.compiler import Build
from monograph.ir.call.forms import CallForms
from monograph.ir.call.misfit import misfit
from monograph.ir.call.modes import key_reasons
from monograph.ir.call.reason import Cause, Reason, joined, of_owned
from monograph.ir.call.signature import NO_KEY, Call, Key, Signature
from monograph.ir.call.varying import Varying
from monograph.ir.port import FREE
from monograph.settings import DynamicSize, Settings

_NEWEST = 16  # builds whose flat check is tried before a call is read
_KEPT_PER_KEY = 8  # builds that differ in guards alone: a swap back and forth finds its build again
_KEPT_OF_INTS = 32  # where ints move: by the branches that are taken for them


@dataclass
class BuildCache:
    """Every build, oldest first, and by key those that may still serve a call."""

    all: list[Build] = field(default_factory=list)
    _live: dict[Key, list[Build]] = field(default_factory=dict)
    newest: list[Build] = field(default_factory=list)  # of those that may still serve a call
    _let_go: dict[Key, Reason] = field(default_factory=dict)  # why the last build for a key was
    _own: OwnPlaces = field(default_factory=OwnPlaces)
    has_own: bool = False  # there are places of the graph's own
    forms: CallForms = field(default_factory=CallForms)
    _used: dict[int, None] = field(
        default_factory=dict
    )  # numbers of builds, in the order of their last steps
    num_dropped: int = 0  # to make room
    # state, by builds that cannot follow it yet
    _waited_for: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @outside_of_traces
    def find(self, call: Call) -> Build | None:
        """The build that fits a call, after a closer look than the check of each call."""
        self.part_own(call)
        if self._waited_for:
            self._follow(self._waited_for, at_last=True)
            self._waited_for = {}
        return self._found(call)

    def _taken(self, call: Call) -> Iterator[Call]:
        """The call, and what it is by the names of sizes that vary."""
        yield call
        yield from self.forms.of(call)

    def declared(self, call: Call, sizes: tuple[DynamicSize, ...], *, others: bool) -> Call | None:
        """A call by the names of sizes that were declared, and of `others` that vary; None if there are builds for it, or no such sizes."""
        by_names = self.forms.declared(call, self._live.keys(), sizes, others=others)
        return None if by_names is None or by_names.key in self._live else by_names

    def known_as(self, call: Call, build: Build) -> Call:
        """A call as a build knows it that serves it: by the names of what varies, if it does so for all of these."""
        return next((taken for taken in self._taken(call) if build in self.builds_for(taken)), call)

    def varied(self, call: Call, *, sizes: bool) -> Call | None:
        """A call that no build fits by the names of what alone differs from others: ints, and `sizes`; None if nothing does."""
        return self.forms.new(call, {**self._live, **self._let_go}.keys(), sizes=sizes)

    def why_static(self, call: Call, *, sizes: bool) -> str:
        """Why a size of a call is a number, as an earlier capture has found; empty if none has."""
        return self.forms.why_static(call, {**self._live, **self._let_go}.keys(), sizes=sizes)

    @outside_of_traces
    def find_beside(self, build: Build, call: Call) -> Build | None:
        """Another build that fits, and that is found first from now on: this one cannot run the call."""
        builds = next(builds for builds in self._live.values() if build in builds)
        builds.sort(key=lambda item: item is build)
        self._note_newest()
        found = self._found(call)
        return None if found is build else found

    def _note_newest(self) -> None:
        self.newest = [build for builds in reversed(self._live.values()) for build in builds][:_NEWEST]

    def living(self) -> list[Build]:
        """The builds that may still serve a call."""
        return [build for builds in self._live.values() for build in builds]

    def part_own(self, call: Call) -> None:
        """Put copies where somebody else has what is the graph's own."""
        self._own.part(lambda: self._tensors(call))

    def take_back_own(self) -> None:
        """Put back what this call has replaced by copies: its step has failed."""
        self._own.roll_back()

    def count_own(self) -> None:
        """Who has the tensors that are the graph's own, now that all know them."""
        self._own.count()

    def gradients_seen(self) -> GradientsSeen | None:
        """What the steps of the builds do with gradients; None if there are none."""
        return GradientsSeen.of_all([build.captured.gradients for build in self.all])

    @property
    def own(self) -> list[torch.Tensor]:
        """Tensors of the graph alone, which steps put where eager mode puts new ones."""
        return self._own.tensors

    def _tensors(self, call: Call) -> list[torch.Tensor]:
        """All tensors that a call could be about."""
        known = [tensor for build in self.all for tensor in build.guards.tensors.values()]
        return known + [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]

    def _found(self, call: Call) -> Build | None:
        return next(filter(None, map(self._found_by_key, self._taken(call))), None)

    @outside_of_traces
    def serving_but_for_ones(self, call: Call) -> tuple[Call, list[tuple[Call, Build]]]:
        """A call with numbers for sizes of one and names for the others, and as the builds know it that would serve it otherwise."""
        for taken in self.forms.of(call):
            builds = [item for item in self._live.get(taken.key, ()) if not item.takes_ones(taken)]
            fitting = [(taken, build) for build in builds if build.fits(taken)]
            if fitting and (by_names := self.forms.without_ones(call, taken)) is not None:
                return by_names, fitting
        return call, []

    def builds_for(self, call: Call) -> list[Build]:
        """Those for the key of a call, and for its sizes of one if it is known by names."""
        return [build for build in self._live.get(call.key, ()) if build.takes_ones(call)]

    def check_repeatable(self, call: Call, doing: str) -> None:
        """Raise CaptureError if each capture of this call changes what cannot be put back. `doing` begins the sentence."""
        check_repeatable([build.captured.effects for build in self.builds_for(call)[:1]], doing)

    def _found_by_key(self, call: Call) -> Build | None:
        builds = self.builds_for(call)
        for build in builds:
            if build.fits(call):
                return build
        for build in builds:
            if next(build.differences(call), None) is None:
                build.guards.settle()  # values are other objects that are equal
                return build
        for build in builds:  # those that follow may have been let go of
            if build in self.builds_for(call) and build.bind_anew() is None:
                self._follow(build.guards.tensors)
                self._own.recount()
                if next(build.differences(call), None) is None:
                    return build
        return None

    @outside_of_traces
    def made_for(self, settings: Settings, version: int) -> list[tuple[Signature, Build]]:
        """The builds for these settings, those whose guards hold first, then the newest first."""
        order = {id(build): number for number, build in enumerate(self.all)}
        for build in self.living():
            if not build.guards.hold_by_value():
                build.bind_anew()
        found = [
            (key.signature, build)
            for key, builds in self._live.items()
            if (key.settings, key.version) == (settings, version)
            for build in builds
        ]
        return sorted(found, key=lambda item: (not item[1].guards.hold_by_value(), -order[id(item[1])]))

    @outside_of_traces
    def keep(self, key: Key, build: Build) -> None:
        """Add a build. Builds on tensors that are no longer the state let go of them."""
        self._follow(build.guards.tensors)
        kept = _KEPT_OF_INTS if int in key.signature[1] else _KEPT_PER_KEY
        for old in self._live.get(key, [])[kept - 1 :]:
            _release(old)
            self._live[key].remove(old)
        self._live.setdefault(key, []).insert(0, build)
        self.all.append(build)
        self._note_newest()
        self._own.add(build.captured.own)
        self.has_own |= bool(build.captured.own)

    @outside_of_traces
    def let_go(self, state: Collection[int]) -> set[int]:
        """Drop builds whose guards fail and that hold objects which the step knows weakly; gives their ids.

        Those of which the id is in `state` are there anyway: a recurrent layer knows its own weights so.
        """
        dropped = set[int]()
        for build in self.living():
            held = not all(id(item) in state for item in build.guards.shared)
            if held and not build.guards.hold_by_value():
                dropped |= set(map(id, build.guards.shared))
                _take_out(build, self._live.values())
                build.release()
        if dropped:
            self._note_newest()
            gc.collect()
        return dropped

    def _follow(self, tensors: Mapping[str, torch.Tensor], *, at_last: bool = False) -> None:
        """Bind builds to these tensors where they are bound to others in their places, or let them go of those.

        Where tensors that steps put into places are gone from there, the builds wait for the next call, which is `at_last`.
        """
        own = set(map(id, self.own))  # these each build takes when it is called again
        for key, builds in self._live.items():
            for old in list(builds):
                if not (paths := _replaced(old.guards.tensors, tensors, own)):
                    continue
                refused = old.bind_anew()
                if refused is None and (at_last or not _replaced(old.guards.tensors, tensors, own)):
                    continue
                if not at_last and any(place.get() is None for place in old.captured.own):
                    self._waited_for = tensors
                    continue
                self._let_go[key] = of_owned(refused or f"{paths[0]} was replaced").after(
                    "the build for this was let go when "
                )
                _release(old)
                builds.remove(old)
        self._note_newest()

    def moved(self) -> list[Place]:
        """Where numbers are that have changed since some build was made."""
        return [place for build in self.living() for place in moved_numbers(build.guards.sources)]

    def replace(self, old: Build, new: Build) -> None:
        """Put a build that was captured again in the place of the one that could not run."""
        self.exchange(old, new)
        old.release()

    def exchange(self, old: Build, new: Build) -> None:
        """Put a build in the place of one that does the same."""
        for builds in (self.all, *self._live.values()):
            if old in builds:
                builds[builds.index(old)] = new
        self._note_newest()

    def is_by_names(self, build: Build) -> bool:
        """True if sizes vary in this build."""
        return Varying.in_key(self._key_of(build)) is not None

    def _key_of(self, build: Build) -> Key:
        return next((key for key, builds in self._live.items() if build in builds), NO_KEY)

    def drop(self, build: Build) -> Key:
        """Forget a build that cannot run; gives its key."""
        key = self._key_of(build)
        _take_out(build, [self.all, *self._live.values()])
        self._live = {key: builds for key, builds in self._live.items() if builds}
        self._note_newest()
        build.release()
        return key

    # --- room for more ----------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """That of the next build."""
        return self.all[-1].number + 1 if self.all else 0

    def note_use(self, build: Build) -> None:
        """A build runs, after another one."""
        self._used.pop(build.number, None)
        self._used[build.number] = None

    def make_room(self, most: int) -> list[int]:
        """Keep the `most` recently used builds of those that may still serve a call; gives the numbers of the others."""
        living = set(map(id, self.living()))
        used = {number: at for at, number in enumerate(self._used)}
        order = sorted(self.all, key=lambda build: (id(build) in living, used.get(build.number, -1)))
        dropped = order[: max(len(order) - most, 0)]
        for build in dropped:
            self._used.pop(build.number, None)
            key = self.drop(build)
            if id(build) in living:
                self._let_go[key] = Reason(f"build {build.number} was dropped for others", Cause.ROOM)
        self.num_dropped += len(dropped)
        return [build.number for build in dropped]

    def signatures(self) -> list[Signature]:
        """The signatures that have builds."""
        return [key.signature for key in self._live]

    @outside_of_traces
    def reason(self, call: Call) -> Reason:
        """Why no build fits this call, as a sentence."""
        if not self.all:
            return Reason("first call", Cause.FIRST)
        worded = partial(_with_writer, self.living())
        found = next(filter(None, (joined(reasons, worded) for reasons in self._reasons(call))), None)
        return found or Reason("a new form of arguments", Cause.STRUCTURE)

    def _reasons(self, call: Call) -> Iterator[list[Reason]]:
        """All that keeps a build from serving this call, for one build after the other: first for that which nearly does."""
        forms = list(self._taken(call))
        pairs = [(build, taken) for taken in forms for build in self.builds_for(taken)]
        found = [[*build.differences(taken)] or [Reason("a guard failed")] for build, taken in pairs]
        yield from sorted(found, key=len)
        for taken in forms:
            if not self._live.get(taken.key) and taken.key in self._let_go:
                yield [self._let_go[taken.key]]
        for known in reversed(self._live):
            for taken in forms:
                if known.signature[:3] == taken.key.signature[:3]:
                    yield list(key_reasons(known, taken.key))
        if (difference := misfit(call, self.signatures())) is not None:
            yield [difference.followed_by(self.forms.staying.about(call, difference))]


def _with_writer(builds: Sequence[Build], reason: Reason) -> Reason:
    """A reason with the line of build() that gives this place its value, if a step of one of these does."""
    writing = [build for build in builds if reason.place and reason.place in build.captured.places_written()]
    name = reason.place.rpartition(".")[2]
    lines = {line for build in writing for line in lines_that_store(build.guards.sources, name)}
    return reason.followed_by(f", which {lines.pop()} writes") if len(lines) == 1 else reason


def _take_out(build: Build, lists: Iterable[list[Build]]) -> None:
    for builds in lists:
        if build in builds:
            builds.remove(build)


def _release(build: Build) -> None:
    """Let go of the tensors of a build, and of what its trace still has of them if weak references lead there."""
    collect = build.guards.know_weakly
    build.release()
    if collect:
        gc.collect()


def _replaced(
    old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], own: Collection[int]
) -> list[str]:
    """The paths of state tensors of `old` that are no longer those there, but for the graph's own."""
    return [
        path
        for path, tensor in old.items()
        if new.get(path, tensor) is not tensor and id(new[path]) not in own and not path.startswith(FREE)
    ]
