"""The inside of a graph: what it has registered, its state and its builds, and how one is found or made for a call."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from monograph.cache import BuildCache
from monograph.capture.captured import Captured
from monograph.capture.effects.gradients import OldGradientError
from monograph.capture.numbers.taken import ValuesTaken
from monograph.capture.optimizers.first_state import FirstState
from monograph.capture.step.request import Request
from monograph.capture.trace import LOGGER, capture
from monograph.compat.distributed.fully_shard import may_have_shards, put_back_shards
from monograph.compat.modes import outside_of_modes
from monograph.compiler import Build, Builds, compile_step
from monograph.errors import CaptureError, DefinitionError, TornStateError
from monograph.inspect.printed.debug import DebugOptions, observer_for
from monograph.internals.advice import Advised, after_capture, size_needed_by, why_fixed
from monograph.internals.build_limits import check_limit, counted_build, drop_for_one
from monograph.internals.declared_sizes import FixedSizeError, check_declared, make_by_names
from monograph.internals.misfit import about_misfit
from monograph.internals.mistakes import Mistakes
from monograph.internals.registry import Kind, Registry
from monograph.internals.sizes_of_one import NotPermitted, Served, capture_unless_served
from monograph.internals.together import Together, prepare, sizes_vary
from monograph.internals.upgrades import Upgrades, can_wait
from monograph.ir.call.modes import gradient_forms, read_with_key
from monograph.ir.call.parameters import argument_names, call_plan, check_count
from monograph.ir.call.reason import Reason
from monograph.ir.call.signature import Call, Signature
from monograph.ir.probes import ProbeLog
from monograph.settings import DynamicSize, Settings
from monograph.state.find import Owned, kept_parameters
from monograph.state.signals import Hold, interruptible
from monograph.state.state_store import StateStore
from monograph.user_code.lines import user_place
from monograph.user_code.tracebacks import forget_locals, interrupts_say

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, as they were given
Capture: TypeAlias = Callable[[Request], Captured]

_PRIVATE: Final = frozenset({"_monograph"})  # the attributes of a Graph that are no user's
RUNNING = threading.local()  # which Graph is inside its build() in this thread


class Internals:
    """All of a graph that users do not see. `internals_of(graph)` gives it.

    Who uses what, besides `name`, `settings` and `owned`:

    - `Graph` and `call`: all
    - `numerics`, for what is looked at (`verify`, `replay` and the like): `check_usable`, `formed`, `read`, `request`,
      `build_for`, `in_build`, `store`, `first_state`, `builds`, `probes`
    - `state_dict`: `check_whole`, `registry`, `store`, `first_state`, `builds`
    - `artifact` and `export`: `present_builds`, `builds`, `declared`, `names`, `request`, `in_build`, `store`, `first_state`
    - `resume` and `flow`: `registry`, `store`; benchmarks: `read`, `build_for`
    """

    def __init__(self, graph: Any, kind: Kind, name: str) -> None:
        self.registry = Registry(graph, name, kind.block, _PRIVATE)
        self.store = StateStore()
        self.cache = BuildCache()
        self.together = Together()
        self.upgrades = Upgrades(partial(self.together.may_swap, name))
        self.first_state = FirstState()
        self.mistakes = Mistakes()
        self.advised = Advised()
        self.names = argument_names(graph.build)
        self.declared: tuple[Arguments, ...] = ()  # calls with sizes that may vary
        self.debug = DebugOptions()
        self.probes = ProbeLog()
        self.counted: dict[str, int] = {}  # the steps in the store, as they are after the present one
        self._last = kind.last
        self._forms: dict[tuple[Any, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {}

    # --- copies ------------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """What a copy has too. Builds and locks are left out: a copied or unpickled graph captures anew."""
        registry, store = self.registry, self.store
        held = {name: value for name, value in vars(registry).items() if not name.startswith("_")}
        own = {"declared": self.declared, "debug": self.debug, "probes": self.probes}
        return {**held, "version": registry.version, **own, "steps": store.steps, "torn": store.torn}

    @staticmethod
    def restored(graph: Any, kind: Kind, state: dict[str, Any]) -> Internals:
        """The inside of a copy, whose `__getstate__` gave the state."""
        if "_monograph" not in state:  # of version 0.1, where each thing had an attribute of its own
            earlier = {*state["_private"], "_steps", "_torn"}
            state["_monograph"] = {name[1:]: state.pop(name) for name in earlier & state.keys()}
        saved: dict[str, Any] = state["_monograph"]
        made = Internals(graph, kind, saved["name"])
        for item in (made.registry, made, made.store):
            vars(item).update({name: saved[name] for name in vars(item) if name in saved})
        made.registry.adopt(state.values(), saved["version"])
        return made

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """`<class name>_<number>`."""
        return self.registry.name

    @property
    def settings(self) -> Settings:
        """The present ones."""
        return self.registry.config.settings

    def owned(self) -> Owned:
        """What the graph holds now."""
        return self.registry.owned()

    @property
    def builds(self) -> Builds:
        """Every build, oldest first."""
        return Builds(self.cache.all)

    def newest(self) -> Build:
        """The newest build. Raises DefinitionError if there is none."""
        if not self.cache.all:
            raise DefinitionError(f"{self.name} has no build yet", hint="call it, or compile(), first")
        return self.cache.all[-1]

    def present_builds(self) -> list[tuple[Signature, Build]]:
        """The builds for what is held and set now, with what their calls must match; those that still hold first."""
        return self.cache.made_for(self.settings, self.registry.version)

    # --- is it fit for use? ------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise the error that a call of the graph would be now, whatever its arguments."""
        outer = getattr(RUNNING, "graph", None)
        if outer is not None:
            raise CaptureError(
                f"{self.name} is called inside build() of {outer}: graphs cannot be nested",
                where=user_place(),
                hint="call the module in build(), and keep one Graph around the whole step",
            )
        self.registry.check_not_swapped("is called")
        self.check_whole()
        graph = self.registry.graph
        if getattr(type(graph).build, "__isabstractmethod__", False):
            graph.build()

    def check_whole(self) -> None:
        """Raise TornStateError if a failed step has left the state in parts."""
        if self.store.torn:
            raise TornStateError(
                f"{self.name} cannot go on: {self.store.torn}",
                hint="load a checkpoint with load_state_dict(); the state of before that step is gone",
            )

    # --- from arguments to a build -----------------------------------------------------------------------------------

    def formed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments in the form in which a call is known, whether they were given by position or by name."""
        if self._last in kwargs:
            args = (*args, kwargs[self._last])
            kwargs = {name: value for name, value in kwargs.items() if name != self._last}
        form = (len(args), *kwargs)
        plan = self._forms.get(form)
        if plan is None:
            plan = self._forms[form] = call_plan(self.registry.graph.build, len(args), tuple(kwargs))
        moved, named = plan
        return (*args, *[kwargs[name] for name in moved]), {name: kwargs[name] for name in named}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call with its key. Modules that an eager forward has left whole are in parts again."""
        if may_have_shards():
            put_back_shards(self.registry.modules().values())
        settings, gradients = self.settings, None
        if settings.keep_gradients:
            gradients = gradient_forms(kept_parameters(self.owned(), settings))
        return read_with_key(args, kwargs, self.names, settings, self.registry.version, gradients)

    def request(self, call: Call) -> Request:
        """What a capture of this call is asked for."""
        what = (self.name, self.registry.graph.build, call, self.owned(), self.settings)
        first, is_first = self.first_state.owners(), not self.cache.all
        return Request(*what, probes=self.probes, waiting=first, is_first=is_first)

    def request_of_build(self, call: Call, *, is_rare: bool) -> Request:
        """The same for a new build. What is rare runs op by op at first."""
        settings = replace(self.settings, background=True) if is_rare else self.settings
        return replace(
            self.request(call),
            settings=settings,
            own=self.cache.own,
            moved=self.cache.moved(),
            before=self.cache.gradients_seen(),
        )

    @contextmanager
    def in_build(self) -> Iterator[None]:
        """Around what calls build()."""
        RUNNING.graph = self.name
        try:
            yield
        finally:
            RUNNING.graph = None

    def build_for(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: tuple[DynamicSize, ...] | None = None,
    ) -> Build:
        """The build that fits this call after a closer look, made now if there is none.

        `sizes` are declared to vary, by default those of the configuration.
        """
        if (build := self.first_state.found(partial(self.cache.find, call))) is None:
            check_count(self.registry.graph.build, args, kwargs)
            declared = self.settings.sizes if sizes is None else sizes
            try:
                build = self._made(call, self.cache.reason(call), declared)
            except OldGradientError as error:
                self.registry.let_gradients_stay(error, is_first=not self.cache.all)
                return self.build_for(self.read(args, kwargs), args, kwargs, sizes)
        self.note_use(build)  # before tensors are counted: the build used last has those that are replaced
        self.cache.count_own()
        return build

    def _made(self, call: Call, reason: Reason, sizes: tuple[DynamicSize, ...]) -> Build:
        """A new build: for all sizes that were declared, and for all sizes and ints in which alone it differs from others."""
        cache, may_vary = self.cache, sizes_vary(self.settings)
        check_declared(call, sizes)
        while True:
            declared = cache.declared(call, sizes, others=may_vary)
            by_names = declared or cache.varied(call, sizes=may_vary)
            if by_names is None:
                return self._served_or_made(call, reason, cache.why_static(call, sizes=may_vary))
            permitted = self._permitted(by_names, reason)
            try:
                return make_by_names(self.build_of, by_names, permitted, sizes if declared else ())
            except ValuesTaken as error:
                cache.forms.staying.note(by_names, error.places)
                reason = cache.reason(call)
            except Exception as error:
                if isinstance(error, FixedSizeError):
                    raise
                level = logging.INFO if declared is None else logging.WARNING
                LOGGER.log(level, "%s: numbers stay what they are in this build: %s", self.name, error)
                cache.forms.is_static(by_names.key, size_needed_by(error))

    def _served_or_made(self, call: Call, reason: Reason, stays: str) -> Build:
        """The build for all sizes, if it makes the step for sizes of one too, or a new one, which is rarely used."""
        may_vary = sizes_vary(self.settings)
        by_names, candidates = self.cache.serving_but_for_ones(call) if may_vary else (call, [])
        if not candidates:
            return self.make_build(call, reason, stays)
        reason = self.advised.about(reason, call, stays)
        permit = partial(check_limit, self.name, self.settings, len(self.cache.all), reason)
        capture_by = partial(capture_unless_served, candidates, permit)
        try:
            return self.build_of(by_names, reason, capture_by, is_rare=can_wait(self.settings))
        except Served as found:
            return found.build()
        except NotPermitted as found:
            raise found.error from None
        except Exception as error:
            if by_names is call:
                raise
            LOGGER.info("%s: numbers stay what they are in this build: %s", self.name, error)
            self.cache.forms.is_static(by_names.key)
        return self._served_or_made(call, reason, stays)

    def make_build(self, call: Call, reason: Reason, stays: str = "") -> Build:
        """A new build for a call; `stays` says why its sizes are numbers."""
        return self.build_of(call, self._permitted(call, reason, stays))

    def _permitted(self, call: Call, reason: Reason, stays: str = "") -> Reason:
        """The reason for a build, with advice. Raises CaptureError if the configuration allows no further one."""
        reason = self.advised.about(reason, call, stays)
        check_limit(self.name, self.settings, len(self.cache.all), reason)
        return reason

    def build_of(
        self, call: Call, reason: Reason, capture_by: Capture = capture, *, is_rare: bool = False
    ) -> Build:
        """A new build of what is captured. What is rare is compiled later, if it turns out to be frequent."""
        cache, number, optimizers = self.cache, self.cache.next_number(), self.registry.optimizers
        self.upgrades.check(self.settings, self.store.steps, number)
        self.store.forget(cache.let_go(self.owned().held_by_modules()))
        self.mistakes.before_capture(self.name, self.owned())
        observer = observer_for(self.debug, self.name, type(self.registry.graph).__name__, number)
        request = replace(self.request_of_build(call, is_rare=is_rare), observer=observer)
        with interruptible() as hold:  # a build is kept as soon as its capture cannot be undone any more
            doing = f"capturing build {number}; {self.name} is unchanged, call it again"
            with counted_build(self.name, reason), self.first_state.noted(optimizers), interrupts_say(doing):
                try:
                    build = self._compiled(call, request, reason, number, hold, capture_by)
                except Exception as error:
                    forget_locals(error)
                    gc.collect()  # a trace is in cycles
                    raise
            build = after_capture(build, call, drop_last=self.advised.drop_last)
            build = replace(build, settings=self.settings) if is_rare else build
            self.keep(call, build, is_rare=is_rare)
        return build

    def keep(self, call: Call, build: Build, *, is_rare: bool = False) -> None:
        """Add a build for calls like this one."""
        call = self.cache.forms.narrowed(call, why_fixed(build.captured.fixed))
        self.advised.note(self.name, build.captured.notes)
        self.advised.log(self.name, build, call)
        drop_for_one(self.name, self.settings, self.cache, self.upgrades, self.mistakes)
        self.cache.forms.keep(call)
        self.cache.keep(call.key, build)
        self.upgrades.await_for(build, self.cache.living(), is_rare=is_rare)
        if build.guards.know_weakly:
            build.guards.share(build.held())
        self.note_use(build)

    def note_use(self, build: Build) -> None:
        """A build runs, after another one."""
        self.store.tensors = build.guards.tensors
        self.cache.note_use(build)

    def _compiled(
        self, call: Call, request: Request, reason: Reason, number: int, hold: Hold, capture_by: Capture
    ) -> Build:
        """The build for a call. Arguments that build() cannot take are reported as such."""
        try:
            building = self.together.building(self.name, type(self.registry.graph))
            with building, self.in_build(), outside_of_modes():
                prepare(request, self.together)
                return compile_step(request, reason=reason, number=number, hold=hold, capture_by=capture_by)
        except (Served, NotPermitted, OldGradientError):
            raise
        except Exception as error:
            told = about_misfit(error, call, self.cache.signatures(), self._last)
            raise told from (error.__cause__ if told is error else error)


def internals_of(graph: Any) -> Internals:
    """The inside of a graph."""
    internals: Internals = graph._monograph
    return internals
