"""Compiled steps for single sizes that come often, beside the one for all sizes.

Code for one size is up to twice as fast: kernels are chosen for it by measurement, and loops know how long they are. But it
costs a compilation. So it is made, by another process, for sizes at which steps have taken as long as that; then the
next steps at such a size run by the one and by the other, and the faster stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

import torch

from monograph.capture.trace import LOGGER, outside_of_traces
from monograph.compat.amp import without_autocast
from monograph.compat.modes import outside_of_modes
from monograph.compiler import Build
from monograph.internals.build_limits import check_limit, counted_build
from monograph.internals.internals import Internals
from monograph.internals.other_captures import build_apart
from monograph.internals.upgrades import LEAST, ToInductor, can_wait
from monograph.ir.call.reason import Cause, Reason
from monograph.ir.call.signature import Call, TensorKey
from monograph.ir.call.varying import Varying, by_numbers

_MOST: Final = 4  # sizes for which a build has others
_TIMED: Final = 12  # steps by each of the two; the first ones are not looked at
_UNTIMED: Final = 4
_FASTER: Final = 0.97  # of the time, or it does not pay to keep it
_KNOWN: Final = 4096  # sizes; of so many none comes often

_Shapes = tuple[torch.Size, ...]


def watch(graph: Internals, build: Build) -> None:
    """Look out for sizes that come often to a build that is compiled for all. Those that were declared are one build's."""
    known, settings = graph.upgrades.frequent, build.settings
    if build.communicates:  # all take the same code, and no clock says so
        return
    if build.number in known or build.backend != settings.backend or not can_wait(settings):
        return
    if graph.cache.is_by_names(build) and not (graph.declared or settings.sizes):
        known[build.number] = FrequentSizes(graph, max(build.seconds, LEAST))


@dataclass
class _Candidate:
    """A step for one size, on its way or in comparison."""

    build: Build  # op by op, until it is compiled
    upgrade: ToInductor | None = field(default_factory=lambda: ToInductor(None))  # None once it is compiled
    seconds: list[float] = field(default_factory=list)  # of steps by it
    seconds_by_all: list[float] = field(default_factory=list)


class FrequentSizes:
    """The sizes that come to a build for all of them, and how long steps at each have taken."""

    def __init__(self, graph: Internals, worth: float) -> None:
        """A step is compiled for a size once steps at it have taken `worth` seconds."""
        self._graph, self._worth = graph, worth
        self._spent: dict[_Shapes, float] = {}
        self._candidates: dict[_Shapes, _Candidate | None] = {}  # None once it is decided
        self._note: Callable[[float], object] = self._spend
        self._shapes: _Shapes = ()

    def build_for(self, build: Build, leaves: Sequence[Any], read: Callable[[], Call]) -> Build:
        """The build that runs this step: that for all sizes, or the one for the present size."""
        self._shapes = tuple([leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)])
        self._note = self._spend
        try:
            return self._build_for(build, leaves, read)
        except Exception as error:  # the training goes on without it, whatever it is
            LOGGER.info("%s: no step is compiled for one size: %s", self._graph.name, error)
            self._candidates[self._shapes] = None
            return build

    def count(self, seconds: float) -> None:
        """Note how long the step has taken."""
        self._note(seconds)

    def _spend(self, seconds: float) -> None:
        if len(self._spent) >= _KNOWN:
            self._spent.clear()
        self._spent[self._shapes] = self._spent.get(self._shapes, 0.0) + seconds

    def _build_for(self, build: Build, leaves: Sequence[Any], read: Callable[[], Call]) -> Build:
        shapes = self._shapes
        if shapes not in self._candidates:
            if self._spent.get(shapes, 0.0) >= self._worth and len(self._candidates) < _MOST:
                self._candidates[shapes] = self._begun(build, read())
            return build
        candidate = self._candidates[shapes]
        if candidate is None or not self._is_compiled(candidate, leaves):
            return build
        call = by_numbers(self._graph.cache.known_as(read(), build))  # ints that move go on doing so
        if not outside_of_traces(candidate.build.fits)(call):  # something has changed since its capture
            del self._candidates[shapes], self._spent[shapes]
            return build
        if len(candidate.seconds) < _TIMED:
            one_after_the_other = len(candidate.seconds) < len(candidate.seconds_by_all)
            self._note = (candidate.seconds if one_after_the_other else candidate.seconds_by_all).append
            return candidate.build if one_after_the_other else build
        self._candidates[shapes] = None
        return self._faster(candidate, build, call)

    def _begun(self, build: Build, call: Call) -> _Candidate | None:
        """The candidate for a size that comes often; None if no further build is permitted."""
        call = self._graph.cache.known_as(call, build)
        sizes = _shown_sizes(call)
        reason = Reason(f"steps at {sizes} come often: they have a compiled step of their own", Cause.OFTEN)
        if not self._has_room(reason):
            return None
        return _Candidate(build_apart(self._graph, by_numbers(call), reason))

    def _has_room(self, reason: Reason) -> bool:
        """True if one more build takes nobody's place. Raises CaptureError if the configuration allows none."""
        settings, num_builds = self._graph.settings, len(self._graph.cache.all)
        if settings.max_builds is not None and num_builds >= settings.max_builds:
            return False
        check_limit(self._graph.name, settings, num_builds, reason)
        return True

    def _is_compiled(self, candidate: _Candidate, leaves: Sequence[Any]) -> bool:
        if candidate.upgrade is not None:
            with outside_of_modes(), without_autocast():
                made = candidate.upgrade.successor(candidate.build, self._graph.store.steps, leaves)
            if made is None:
                return False
            candidate.build, candidate.upgrade = made, None
        return True

    def _faster(self, candidate: _Candidate, build: Build, call: Call) -> Build:
        """The one of the two builds that stays for this size."""
        one, all_sizes = (
            median(seconds[_UNTIMED:]) for seconds in (candidate.seconds, candidate.seconds_by_all)
        )
        if one > _FASTER * all_sizes or not self._has_room(candidate.build.reason):
            candidate.build.release()
            return build
        made = replace(candidate.build, number=self._graph.cache.next_number())
        with counted_build(self._graph.name, made.reason):
            self._graph.keep(call, made)
        return made


def _shown_sizes(call: Call) -> str:
    varying = Varying.in_key(call.key)
    names = () if varying is None else varying.names
    found: dict[str, str] = {}
    for path, key, row in zip(call.paths(), call.keys, names, strict=False):
        for dim, name in enumerate(row):
            if name is not None and isinstance(key, TensorKey):
                found.setdefault(name, f"{path}.size({dim}) = {int(key.shape[dim])}")
    return ", ".join(found.values())
