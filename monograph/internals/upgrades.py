"""Builds that begin on `aten` and go on by compiled code once another process has made it, between two steps.

The code of `exact` computes the same bits: nobody notices but by the clock. That of `inductor` rounds otherwise: the step at which it
takes over can be chosen, is written into the build and into checkpoints, and is the same on resume.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from monograph.backends.exact import Lowering
from monograph.cache import BuildCache
from monograph.compat.amp import without_autocast
from monograph.compat.modes import outside_of_modes
from monograph.compiler import Build
from monograph.elementwise.compiling import Compilation, missing
from monograph.errors import BackendError, ConfigError
from monograph.ir.call.signature import Call
from monograph.settings import Settings
from monograph.state.signals import held_back

if TYPE_CHECKING:
    from monograph.backends.beside import CompiledBeside

LOGGER = logging.getLogger("monograph")

# Steps that have taken as long as compiling takes: who makes so many makes more, as far as anybody knows.
_WORTH_IT: Final = 0.5  # seconds
LEAST: Final = (
    10.0  # seconds, for compiling whole steps; one that was found in the cache says nothing of the next
)


def can_wait(settings: Settings) -> bool:
    """True if steps may be compiled when they turn out to be frequent.

    With deterministic algorithms they may not: which code runs would depend on the clock.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    return settings.is_compiled and not settings.background and not deterministic


class Upgrade(Protocol):
    """How far the compiled code of a build is."""

    def status(self) -> str:
        """The same in words."""

    def successor(self, build: Build, step: int, leaves: Sequence[Any]) -> Build | None:
        """What takes the place of the build from this step on, which gets these arguments. Raises BackendError if there is none."""

    def count(self, seconds: float) -> None:
        """Note how long a step has taken."""


class Frequent(Protocol):
    """What compiles further steps for sizes that come often to a build for all of them."""

    def build_for(self, build: Build, leaves: Sequence[Any], read: Callable[[], Call]) -> Build:
        """The build that runs a step with these arguments, which `read` reads."""

    def count(self, seconds: float) -> None:
        """Note how long a step has taken."""


@dataclass
class Upgrades:
    """Those of a graph, by the number of the build.

    `may_swap(build, step, is_ready)` is true from a step on which all processes that take it together have agreed on.
    """

    may_swap: Callable[[Build, int, bool], bool]
    swapped_at: int | None = (
        None  # the first step by other bits: of this graph, or of the training that it goes on with
    )
    pending: dict[int, Upgrade] = field(default_factory=dict)
    frequent: dict[int, Frequent] = field(default_factory=dict)
    _counts: Upgrade | Frequent | None = None  # the one that the present step is for

    @staticmethod
    def check(settings: Settings, step: int, num_builds: int) -> None:
        """Raise ConfigError for a swap that is to be at a step which this graph has run already, before the next build."""
        if settings.begins_plain and settings.swap_at is not None and num_builds and settings.swap_at < step:
            raise ConfigError(
                f"swap_at={settings.swap_at} has passed: step {step} is next",
                hint="choose a later step, or leave background out: then the next step is compiled",
            )

    def await_for(self, build: Build, living: Iterable[Build], *, is_rare: bool) -> None:
        """Look out for compiled code if the settings of a new build ask for that, or once what is rare has come often.

        `living` are the builds that may still serve a call.
        """
        settings = build.settings
        for number in {*self.pending, *self.frequent} - {item.number for item in living}:
            self.forget(number)
        if is_rare:
            if can_wait(settings):
                worth = max(build.seconds, LEAST)
                self.pending[build.number] = ToInductor(None, worth, self._agreed(build))
        elif settings.is_upgraded:
            self.pending[build.number] = ToExact()
        elif settings.begins_plain:
            known = [item for item in (settings.swap_at, self.swapped_at) if item is not None]
            at = min(known, default=None)
            self.pending[build.number] = ToInductor(at, agreed=self._agreed(build))

    def lines(self) -> list[str]:
        """What explain() says of code that is to come."""
        return [f"code to come for build {number}: {item.status()}" for number, item in self.pending.items()]

    def _agreed(self, build: Build) -> Callable[[int, bool], bool] | None:
        return partial(self.may_swap, build) if build.communicates else None

    def next_build(
        self, cache: BuildCache, build: Build, step: int, leaves: Sequence[Any], read: Callable[[], Call]
    ) -> Build:
        """The build that runs this step: the same, or one by compiled code."""
        if (frequent := self.frequent.get(build.number)) is not None:
            self._counts = frequent
            return frequent.build_for(build, leaves, read)
        self._counts = upgrade = self.pending.get(build.number)
        if upgrade is None:  # many() may hold one that others have taken the place of
            return next((item for item in cache.all if item.number == build.number), build)
        try:
            with outside_of_modes(), without_autocast():
                made = upgrade.successor(build, step, leaves)
        except BackendError as error:
            return self._given_up(cache, build, error.message)
        except Exception as error:  # the training goes on without it, whatever it is
            LOGGER.warning("the step cannot be compiled: %s: %s", type(error).__name__, error)
            return self._given_up(cache, build, f"{type(error).__name__}: {error}")
        if made is None:
            return build
        if made.settings.is_compiled:
            made = replace(made, notes=(*made.notes, f"{made.backend} from step {step} on"))
        with held_back():
            if made.settings.begins_plain and self.swapped_at is None:
                self.swapped_at = step
            del self.pending[build.number]
            cache.exchange(build, made)
        LOGGER.info("build %d goes on by the %s backend from step %d on", made.number, made.backend, step)
        return made

    def _given_up(self, cache: BuildCache, build: Build, problem: str) -> Build:
        goal = "exact" if build.settings.is_upgraded else build.settings.backend
        noted = replace(build, notes=(*build.notes, f"{goal} could not be used: {problem}"))
        with held_back():
            del self.pending[build.number]
            cache.exchange(build, noted)
        return noted

    def timed(self, run: Callable[[], Any]) -> Any:
        """Run the step that the last `next_build` was for, and count its time."""
        start = time.perf_counter()
        made = run()
        if self._counts is not None:
            self._counts.count(time.perf_counter() - start)
        return made

    def forget(self, number: int) -> None:
        """The build of this number serves no call any more: a compiler that works for it ends."""
        self.pending.pop(number, None)
        self.frequent.pop(number, None)


class ToExact:
    """The same bits by compiled code, for steps that have taken some time."""

    def __init__(self) -> None:
        self.compilation: Compilation | None = None
        self.lowering: Lowering | None = None
        self._spent, self._is_tried = 0.0, False

    def status(self) -> str:
        """What it waits for."""
        if self._spent < _WORTH_IT:
            return f"exact compiles it once its steps have taken {_WORTH_IT:g} s, {self._spent:.2g} s so far"
        return "exact, whose compilation runs beside the steps"

    def count(self, seconds: float) -> None:
        """Note how long a step has taken."""
        self._spent += seconds

    def successor(self, build: Build, step: int, leaves: Sequence[Any]) -> Build | None:
        """The build by compiled code, as soon as it is worth while and made; nothing is waited for."""
        if self._spent < _WORTH_IT:
            return None
        if self.compilation is not None:
            if not self.compilation.is_done():
                return None
            with held_back():
                self.compilation.finish()
                self.compilation = None
        if self.lowering is None:
            lowering = Lowering(build.order())
            if lowering.is_empty:
                raise BackendError("nothing of the step is computed element by element, by code of ours")
            waits = self._waits_for(lowering.texts_to_try())
            self.lowering = lowering  # an interrupt before this begins once more
            if waits:
                return None
        if not self._is_tried:
            waits = self._waits_for(self.lowering.texts())
            self._is_tried = True
            if waits:
                return None
        return build.by(self.lowering.finished())

    def _waits_for(self, texts: list[str]) -> bool:
        absent = missing(texts)
        self.compilation = Compilation(absent) if absent else None
        return bool(absent)


class ToInductor:
    """The fastest code, whose bits are others: from a step on that is fixed, or as soon as it is there.

    It is begun once steps have taken `worth` seconds. `agreed(step, is_ready)` is asked where other processes take the steps, too.
    """

    def __init__(
        self,
        swap_at: int | None,
        worth: float = 0.0,
        agreed: Callable[[int, bool], bool] | None = None,
    ) -> None:
        self.compilation: CompiledBeside | None = None
        self._swap_at, self._worth, self._agreed = swap_at, worth, agreed

    def status(self) -> str:
        """What it waits for."""
        if self._worth > 0:
            return f"inductor compiles it once its steps have taken {self._worth:.2g} s more"
        running = "inductor"
        if self.compilation is not None:
            seconds = time.monotonic() - self.compilation.begun
            running = f"inductor, compiling in another process for {seconds:.0f} s"
        return running if self._swap_at is None else f"{running}; it takes over at step {self._swap_at}"

    def count(self, seconds: float) -> None:
        """Note how long a step has taken."""
        self._worth -= seconds

    def successor(self, build: Build, step: int, leaves: Sequence[Any]) -> Build | None:
        """The compiled build. What has to be there at this step is waited for."""
        if self._worth > 0:
            return None
        due = torch.are_deterministic_algorithms_enabled() or (
            self._swap_at is not None and step >= self._swap_at
        )
        if self.compilation is None and not due:
            from monograph.backends.beside import (
                CompiledBeside,
            )  # with the format of artifacts, which few need

            self.compilation = CompiledBeside(build.order(build.settings))
        if not due:
            is_ready = self._swap_at is None and self.compilation is not None and self.compilation.is_done()
            if not (is_ready if self._agreed is None else self._agreed(step, is_ready)):
                return None
        if self.compilation is not None:
            self.compilation.finish()
        return build.lowered_again(build.settings, leaves)
