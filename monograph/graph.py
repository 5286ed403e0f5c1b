"""Graph: the user's class. It finds the build for a call, or makes one, and runs it."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, TypeAlias

import torch
from torch.optim import Optimizer

from monograph.cache import BuildCache
from monograph.capture.effects.arguments import check_leaves, given_containers
from monograph.capture.lazy import initialise_lazy
from monograph.capture.optimizers.first_state import FirstState
from monograph.capture.optimizers.wrapped import layers_of
from monograph.capture.process.signals import handlers_heard, handlers_held_back, raised_by_handler
from monograph.capture.step import Request
from monograph.capture.tensors.item import READ
from monograph.capture.trace import LOGGER, capture_with_values
from monograph.compat.global_state import checks_gradients_for_nan
from monograph.compat.modes import dispatch_mode, num_dispatch_modes, outside_of_modes
from monograph.compat.optimizers import marking_as_stepped
from monograph.compat.symbolic_numbers import is_overflow
from monograph.compiler import Build, Builds, compile_step
from monograph.config import GraphConfig
from monograph.eager import eager_step
from monograph.errors import (
    CaptureError,
    DefinitionError,
    GraphBoundaryError,
    MissingBuildError,
    MonographError,
    NonfiniteError,
    SignatureError,
    TornStateError,
    forget_locals,
    raised_by_user,
    user_place,
    user_place_of,
    with_own_frames,
)
from monograph.inspect.debug import DebugOptions, observer_for
from monograph.inspect.walk import own_inputs
from monograph.inspection import Inspected
from monograph.ir.call.dims import dims_in, with_sizes
from monograph.ir.call.misfit import misfit
from monograph.ir.call.modes import gradient_forms, read_with_key
from monograph.ir.call.parameters import argument_names, call_plan, check_count, check_runs_at_once
from monograph.ir.call.signature import Call, Spec, read_call
from monograph.ir.probes import ProbeLog
from monograph.ir.state_store import StateStore
from monograph.limits import counted_build
from monograph.mistakes import Mistakes, left_schedulers
from monograph.settings import is_compiled
from monograph.state.find import kept_parameters

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # of a call, as they were given

_MANY_BUILDS = 8  # from here on something probably changes at every call, and the log says so aloud
_RUNNING = threading.local()  # which Graph is inside its build() in this thread


class Graph(Inspected):
    """A training or inference step as one static graph. Subclass it and write `build`.

    The first call captures the whole step; later calls replay it with the numbers of eager mode.

    >>> class Double(Graph):
    ...     def build(self, x):
    ...         return x * 2
    >>> Double()(torch.ones(2))
    tensor([2., 2.])
    """

    _counter: ClassVar[Iterator[int]] = itertools.count()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, torch.nn.Module):
            raise DefinitionError(
                f"{cls.__name__} is a Graph and an nn.Module: a Graph holds modules, and is none",
                hint="write the model as an nn.Module, and a Graph with self.model = model",
            )
        cls._counter = itertools.count()
        if "build" in cls.__dict__:
            check_runs_at_once(cls.__dict__["build"], f"build() of {cls.__name__}")
            cls.build = _guarded(cls.__dict__["build"])  # type: ignore[method-assign]

    def __init__(self) -> None:
        own: dict[str, Any] = {
            "_name": f"{type(self).__name__}_{next(type(self)._counter)}",
            "_config": GraphConfig(),
            "_optimizers": (),
            "_store": StateStore(),
            "_cache": BuildCache(),
            "_first_state": FirstState(),
            "_mistakes": Mistakes(),
            "_version": 0,
            "_names": argument_names(self.build),
            "_counted": {},  # the attribute of the store that counts steps, as it is after the present one
            "_forms": {},
            "_debug": DebugOptions(),
            "_probes": ProbeLog(),
            "_scaler": None,
            "_averages": (),
            "_swapped": False,
            "_registered": {},
            "_known_tensors": set(),
            "_declared": (),
        }
        self.__dict__.update(own, _private=frozenset({*own, "_private"}))  # what no step reads

    # --- what a user writes and calls ----------------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step, as eager code. Override it."""
        raise MissingBuildError(
            f"{type(self).__name__} does not define build()",
            hint="write the step there: def build(self, x, y): loss = ...; loss.backward(); return loss",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. The first call, and a call that no build fits, captures one."""
        try:
            self._check_usable()
            if kwargs:
                args, kwargs = self._formed(args, kwargs)
            with self._store.lock:
                if self._first_state.waiting:
                    self._first_state.show()
                try:
                    call = None
                    build = None if kwargs or self._cache.has_own else self._known_build(args)
                    if build is None:
                        call = self._read(args, kwargs)
                        if Spec in map(type, call.leaves):
                            raise SignatureError(
                                "a graph is called with tensors", hint="mg.spec is for compile()"
                            )
                        build = self._build_for(call, args, kwargs)
                    return self._run(build, call, (args, kwargs))
                except BaseException:
                    if not self._store.torn:  # a step that has failed
                        self._first_state.roll_back()
                        self._cache.take_back_own()
                    raise
        except MonographError as error:
            raise error.brief()  # noqa: B904  # it is the same error
        except Exception as error:
            raise with_own_frames(error)  # noqa: B904  # it is the same error

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Capture and compile without running; arguments are tensors or `mg.spec(shape, dtype)`.

        A size that is an `mg.Dim` may vary in what is saved or exported of the graph. The graph itself makes a build
        for each size that it is called with.
        """
        try:
            self._check_usable()
            args, kwargs = self._formed(args, kwargs)
            declared = args, kwargs
            if dims := dims_in(declared):
                args, kwargs = with_sizes(declared, {dim.name: dim.example for dim in dims})
            call = self._read(args, kwargs)
            with self._store.lock, self._first_state.hidden(self._optimizers):
                self._build_for(call, args, kwargs)
            if dims:
                self.__dict__["_declared"] = (*self._declared, declared)
        except MonographError as error:
            raise error.brief()  # noqa: B904  # it is the same error
        except Exception as error:
            raise with_own_frames(error)  # noqa: B904  # it is the same error

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same step run eagerly, as the reference. Gradients are left as a step of the graph leaves them."""
        self._check_usable()
        args, kwargs = self._formed(args, kwargs)
        call = read_call(args, kwargs, self._names)
        owned, settings = self._owned(), self._config.settings
        staying = {id(parameter) for parameter in kept_parameters(owned, settings)}
        parameters = [
            p for module in owned.modules.values() for p in module.parameters() if id(p) not in staying
        ]
        kept = [parameter.grad for parameter in parameters]
        with self._store.lock, self._in_build():
            self._probes.step = self._store.steps
            for parameter in parameters:
                parameter.grad = None
            try:
                returned, stepped = eager_step(self._request(call), (args, kwargs))
            finally:
                if not settings.keep_gradients:
                    for parameter, gradient in zip(parameters, kept, strict=True):
                        parameter.grad = gradient
            self._store.steps += 1
            for held in self._optimizers:
                if held.scheduler is not None:
                    for _ in range(stepped[held.name]):
                        held.scheduler.step()
            left_schedulers(self._optimizers)
        return returned

    # --- what there is ---------------------------------------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """True if there is at least one build."""
        return bool(self._cache.all)

    @property
    def backend(self) -> str:
        """What the newest build runs on; before there is one, what the configuration asks for."""
        builds: list[Build] = self._cache.all
        chosen: str = self._config.settings.backend
        return builds[-1].backend if builds else chosen

    @property
    def builds(self) -> tuple[Build, ...]:
        """Every build, oldest first."""
        return Builds(self._cache.all)

    # --- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Builds and locks are left out: a copied or unpickled graph captures anew."""
        behind = ("_store", "_cache", "_first_state", "_mistakes", "_counted")
        state = {key: value for key, value in self.__dict__.items() if key not in behind}
        return state | {"_steps": self._store.steps, "_torn": self._store.torn}

    def __setstate__(self, state: dict[str, Any]) -> None:
        store = StateStore(steps=state.pop("_steps"), torn=state.pop("_torn"))
        new = {"_cache": BuildCache(), "_first_state": FirstState(), "_mistakes": Mistakes()}
        new |= {"_counted": {}}
        self.__dict__.update(state, _store=store, **new)
        self.__dict__["_private"] = frozenset({*self._private, *new})  # of an older version, there were fewer

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if "_name" not in self.__dict__:
            self._check_initialised("a call")
        outer = getattr(_RUNNING, "graph", None)
        if outer is not None:
            raise CaptureError(
                f"{self.name} is called inside build() of {outer}: graphs cannot be nested",
                where=user_place(),
                hint="call the module in build(), and keep one Graph around the whole step",
            )
        if self._swapped:
            self._check_not_swapped("is called")
        if self._store.torn:
            self._check_whole()
        if type(self).build is Graph.build:
            self.build()

    def _formed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the form in which a call is known, whether they were given by position or by name."""
        form = (len(args), *kwargs)
        plan = self._forms.get(form)
        if plan is None:
            plan = self._forms[form] = call_plan(self.build, len(args), tuple(kwargs))
        moved, named = plan
        return (*args, *[kwargs[name] for name in moved]), {name: kwargs[name] for name in named}

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        settings, gradients = self._config.settings, None
        if settings.keep_gradients:
            gradients = gradient_forms(kept_parameters(self._owned(), settings))
        return read_with_key(args, kwargs, self._names, settings, self._version, gradients)

    def _known_build(self, args: tuple[Any, ...]) -> Build | None:
        """The build that fits a call by a flat check; None if it takes a closer look."""
        settings, version = self._config.settings, self._version
        newest: list[Build] = self._cache.newest
        for build in newest:
            flat = build.guards.flat
            if (
                flat is not None
                and flat.serves(args, settings, version)
                and (not flat.has_branches or build.takes_branches(args))
            ):
                return build
        return None

    def _build_for(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
        """The build that fits this call after a closer look, made now if there is none."""
        build: Build | None = self._cache.find(call)
        if build is None:
            check_count(self.build, args, kwargs)
            build = self._make_build(call, self._cache.reason(call))
        self._cache.count_own()
        return build

    def _make_build(self, call: Call, reason: str) -> Build:
        cache, number = self._cache, len(self._cache.all)
        limit = self._config.settings.max_builds
        if limit is not None and number >= limit:
            raise CaptureError(
                f"{self.name} would need build {number + 1}: {reason}",
                hint=f"max_builds is {limit}{_advice(reason)}",
            )
        self._store.forget(cache.let_go())
        self._mistakes.before_capture(self.name, self._owned())
        observer = observer_for(self._debug, self.name, type(self).__name__)
        request = replace(self._request(call), observer=observer, own=cache.own, moved=cache.moved())
        with counted_build(self.name, reason), self._first_state.noted(self._optimizers):
            try:
                build = self._captured(call, request, reason, number)
            except Exception as error:
                forget_locals(error)
                gc.collect()  # a trace is in cycles
                raise
        if number:
            level = logging.WARNING if number >= _MANY_BUILDS else logging.INFO
            LOGGER.log(level, "%s: build %d: %s%s", self.name, number, reason, _advice(reason))
        cache.keep(call.key, build)
        if build.guards.are_loose:
            build.guards.share(build.held())
        self._store.tensors = build.guards.tensors
        return build

    def _captured(self, call: Call, request: Request, reason: str, number: int) -> Build:
        """The build for a call. Arguments that build() cannot take are reported as such."""
        try:
            with self._in_build(), outside_of_modes():  # ops of a capture are no ops of the step
                with handlers_heard(), handlers_held_back():
                    initialise_lazy(request)
                return compile_step(request, reason=reason, number=number)
        except (CaptureError, TypeError, LookupError, AttributeError) as error:
            if (fault := self._misfit(call, error)) is None:
                raise
            what, where = (
                (error.message, error.where)
                if isinstance(error, MonographError)
                else (error, user_place_of(error))
            )
            raise SignatureError(fault, where=where, hint=f"build() failed with it: {what}") from error

    def _misfit(self, call: Call, error: BaseException) -> str | None:
        """How a call that failed differs from those that went well; None if that is not what the error is about."""
        if isinstance(error, MonographError) and type(error) is not CaptureError:
            return None
        return None if raised_by_user(error) else misfit(call, self._cache.signatures())

    @contextmanager
    def _in_build(self) -> Iterator[None]:
        """Around what calls build()."""
        _RUNNING.graph = self.name
        try:
            yield
        finally:
            _RUNNING.graph = None

    def _request(self, call: Call) -> Request:
        settings, log = self._config.settings, self._probes
        return Request(self.name, self.build, call, self._owned(), settings, probes=log)

    def _run(self, build: Build, call: Call | None, arguments: Arguments) -> Any:
        """Run a build. A call that it was found for by its flat check is read where more than the leaves is needed."""
        if num_dispatch_modes() and is_compiled(build.backend) and (mode := dispatch_mode()) is not None:
            raise GraphBoundaryError(
                f"{self.name} is called under {mode}, a TorchDispatchMode, which sees no ops of {build.backend} code",
                hint='graph.config.backend("aten") replays op by op',
            )
        if torch.is_anomaly_enabled() and checks_gradients_for_nan():
            self._check_backward(build, call or self._read(*arguments))
        if self._optimizers and self._is_unlike_before(build):
            steps = build.captured.steps
            self._mistakes.before_step(self.name, self._optimizers, self._modules, build.number, steps)
        fault = ""
        try:
            return self._run_build(build, call, arguments)
        except TornStateError as error:
            self._store.torn = error.message
            raise
        except NonfiniteError as error:
            leaves = (call or self._read(*arguments)).leaves
            report = self._nonfinite(build, own_inputs(build.executor.bind(leaves)))
            hint = f"the state is that of before the step\n{report}"
            raise NonfiniteError(error.message, where=report.first, hint=hint) from None
        except (RuntimeError, ArithmeticError, ValueError) as error:
            if isinstance(error, (MonographError, torch.OutOfMemoryError)) or raised_by_handler(error):
                raise
            if isinstance(error, RuntimeError) and not is_overflow(error):
                if build.executor.has_run:
                    raise
                build = self._recapture(build, call or self._read(*arguments), error)
            else:
                numbers = build.executor.undone and build.executor.takes_numbers
                if not numbers or raised_by_user(error):
                    raise
                fault = f"{type(error).__name__}: {error}"
        if fault:
            return self._run_beside(build, call or self._read(*arguments), fault, arguments)
        return self._run_build(build, call, arguments)

    def _is_unlike_before(self, build: Build) -> bool:
        """True if the step is to be looked at for mistakes: it is one of the first, or modules changed their mode."""
        watched = self._mistakes.watched.get(build.number)
        if watched is None or self._mistakes.is_young:
            return True
        present = [(root(), mode) for root, mode in watched]
        return any(root is None or root.training is not mode for root, mode in present)

    def _run_build(self, build: Build, call: Call | None, arguments: Arguments) -> Any:
        executor = build.executor
        containers: Sequence[Any] = ()
        if executor.has_changes:
            call = call or self._read(*arguments)
            containers = _changed_containers(build, call, arguments)
        self._store.tensors = build.guards.tensors
        return executor.run(arguments[0] if call is None else call.leaves, self._after(build), containers)

    def _run_beside(self, build: Build, call: Call, fault: str, arguments: Arguments) -> Any:
        """Run the step by another build, since arithmetic on numbers has raised an error, which build() may catch.

        If it does not, its own error is reported, at the user's line.
        """
        another = self._cache.find_beside(build, call)
        if another is None:
            another = self._make_build(call, f"what it computes with numbers raised {fault}")
        executor = another.executor
        try:
            return self._run_build(another, call, arguments)
        except (RuntimeError, ArithmeticError, ValueError):
            if executor.undone and not executor.has_run:
                self._cache.drop(another)  # no build can say what these numbers do
            raise

    def _check_backward(self, build: Build, call: Call) -> None:
        """Raise NonfiniteError if this step makes a NaN in backward: `torch.autograd.set_detect_anomaly(True)`."""
        with outside_of_modes():
            found = self._nan_in_backward(build, own_inputs(build.executor.bind(call.leaves)))
        if found is not None:
            hint = f"the state is that of before the step\n{found}"
            raise NonfiniteError("detect_anomaly: backward() makes a NaN", where=found.where, hint=hint)

    def _recapture(self, build: Build, call: Call, error: RuntimeError) -> Build:
        """A first run failed: a fake kernel may have reported a wrong layout. Trace again on real tensors."""
        LOGGER.warning("%s: the first run failed (%s); tracing on real tensors instead", self.name, error)
        try:
            with self._in_build(), outside_of_modes():
                again = compile_step(
                    self._request(call),
                    reason=build.reason,
                    number=build.number,
                    capture_by=capture_with_values,
                )
        except MonographError:
            self._cache.drop(build)
            if (fault := self._misfit(call, error)) is not None:
                message = " ".join([str(error), *getattr(error, "__notes__", ())])
                raise SignatureError(fault, hint=f"the step failed with it: {message}") from error
            raise error from None
        self._cache.replace(build, again)
        return again

    def _after(self, build: Build) -> Sequence[Callable[[], Any]]:
        """What Python does once the new state is written: count the step, move the schedulers."""
        store, mistakes = self._store, self._mistakes
        self._probes.step = store.steps
        self._counted["steps"] = store.steps + 1
        actions = build.executor.after
        if actions is None or self._averages:
            actions = build.executor.after = self._actions_of(build)
        if self._first_state.shown:
            actions = [*actions, self._first_state.settle]
        if mistakes.is_young and self._optimizers:
            steps = build.captured.steps
            actions = [*actions, partial(mistakes.after_step, self._optimizers, self.name, steps)]
        return actions

    def _actions_of(self, build: Build) -> Sequence[Callable[[], Any]]:
        """What is the same after each step of a build, in functions of C where it can be; the number of updates of an
        average is not.
        """
        actions: list[Callable[[], Any]] = [partial(vars(self._store).update, self._counted)]
        actions += [effect.apply for effect in build.captured.effects.found]
        actions += [growth.apply for growth in build.captured.grown]
        if build.captured.put_again.places:
            actions.append(build.captured.put_again.apply)
        for held in self._optimizers:
            times = build.captured.steps.get(held.name, 0)
            if times:
                layers = [held.optimizer] if held.wrapper is None else layers_of(held.wrapper)
                actions += [marking_as_stepped(item) for item in layers if isinstance(item, Optimizer)]
            if held.scheduler is not None:
                actions += [partial(methodcaller("step"), held.scheduler)] * times
        return actions + [partial(average.finish, average.updates) for average in self._averages]


def _changed_containers(build: Build, call: Call, arguments: Arguments) -> Sequence[Any]:
    """The containers of a call by position, of which the step changes some. Raises CaptureError where it cannot."""
    changes = build.executor.changes
    check_leaves(changes, call, build.executor.held_tensors)
    return given_containers(changes, call, arguments, build.guards.knows_container)


def _advice(reason: str) -> str:
    """What to do where each value that Python reads out of a tensor needs a build."""
    if READ not in reason:
        return ""
    return (
        "; what differs at each step can stay a tensor (torch.where, a padded form), or be a float argument"
    )


def _guarded(build: Callable[..., Any]) -> Callable[..., Any]:
    """build() with a warning when it is called by hand."""

    def run(self: Graph, *args: Any, **kwargs: Any) -> Any:
        if getattr(_RUNNING, "graph", None) is None and "_name" in self.__dict__:
            warnings.warn(
                f"build() of {self.name} was called directly: it runs eagerly, once; call the graph itself instead",
                stacklevel=2,
            )
        return build(self, *args, **kwargs)

    run.__wrapped__ = build  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__qualname__ = build.__name__, build.__doc__, build.__qualname__
    return run
