"""Graph: the user's class. Thin: it holds modules and optimizers, finds the build for a call, and runs it."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from monograph._torch import step_was_called
from monograph.amp import StaticGradScaler
from monograph.block import Block, is_block, unwrap
from monograph.cache import BuildCache, Key
from monograph.capture.averages import Average
from monograph.capture.first_state import FirstState
from monograph.capture.lazy import initialise_lazy
from monograph.capture.optimizers import check_optimizer
from monograph.capture.signature import (
    Call,
    Spec,
    argument_names,
    check_count,
    gradient_forms,
    misfit,
    modes,
    read_call,
)
from monograph.capture.state import HeldOptimizer, Holdings, kept_parameters
from monograph.capture.step import Request
from monograph.capture.trace import LOGGER, capture_with_values
from monograph.compiler import Build, compile_step
from monograph.config import GraphConfig
from monograph.eager import eager_step
from monograph.errors import (
    CaptureError,
    DefinitionError,
    MissingBuildError,
    MonographError,
    OptimizerError,
    SignatureError,
    raised_by_user,
    user_place,
    user_place_of,
)
from monograph.inspect.text import explain_text, graph_text
from monograph.ir.state import StateStore
from monograph.resume.factory import Factory
from monograph.resume.proof import ResumeReport, prove_resume
from monograph.storage.graph_state import Part, Stateful, load_parts, read_parts
from monograph.storage.parts import Contents, graph_parts

_MANY_BUILDS = 8  # from here on something probably changes at every call, and the log says so aloud
_RUNNING = threading.local()  # which Graph is inside its build() in this thread


class Graph:
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
        cls._counter = itertools.count()
        if "build" in cls.__dict__:
            cls.build = _guarded(cls.__dict__["build"])  # type: ignore[method-assign]

    def __init__(self) -> None:
        self.__dict__.update(
            _name=f"{type(self).__name__}_{next(type(self)._counter)}",
            _config=GraphConfig(),
            _optimizers=(),
            _store=StateStore(),
            _cache=BuildCache(),
            _first_state=FirstState(),
            _version=0,
            _names=argument_names(self.build),
            _debug=None,
            _scaler=None,
            _averages=(),
            _swapped=False,
            _registered={},
            _known_tensors=set(),
        )

    # --- what a user writes and calls ----------------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step, as eager code. Override it."""
        raise MissingBuildError(
            f"{type(self).__name__} does not define build()",
            hint="write the step there: def build(self, x, y): loss = ...; loss.backward(); return loss",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. The first call, and a call that no build fits, captures one."""
        self._check_usable()
        call = read_call(args, kwargs, self._names)
        if Spec in map(type, call.leaves):
            raise SignatureError("a graph is called with tensors", hint="mg.spec is for compile()")
        with self._store.lock:
            if self._first_state.waiting:
                self._first_state.show()
            build, inputs = self._build_for(call, args, kwargs)
            return self._run(build, call, inputs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Capture and compile without running; arguments are tensors or `mg.spec(shape, dtype)`."""
        self._check_usable()
        call = read_call(args, kwargs, self._names)
        with self._store.lock, self._first_state.hidden(self._optimizers):
            self._build_for(call, args, kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same step run eagerly, as the reference. Gradients are left as a step of the graph leaves them."""
        self._check_usable()
        call = read_call(args, kwargs, self._names)
        holdings, settings = self._holdings(), self._config.settings
        staying = {id(parameter) for parameter in kept_parameters(holdings, settings)}
        parameters = [
            p for module in holdings.modules.values() for p in module.parameters() if id(p) not in staying
        ]
        kept = [parameter.grad for parameter in parameters]
        with self._store.lock, _inside(self):
            for parameter in parameters:
                parameter.grad = None
            try:
                returned = eager_step(self.build, call, holdings, settings)
            finally:
                if not settings.keep_gradients:
                    for parameter, gradient in zip(parameters, kept, strict=True):
                        parameter.grad = gradient
            self._store.steps += 1
            for held in self._optimizers:
                if held.scheduler is not None:
                    held.scheduler.step()
        return returned

    def add_optimizer(
        self, optim: Optimizer, *, lr_sch: LRScheduler | None = None, manual: bool = False
    ) -> None:
        """Let the graph own an optimizer; its update is part of the step.

        `lr_sch` is stepped on the host once per optimizer step. With `manual=True` build() itself calls
        `optim.step()`.
        """
        self._check_initialised("add_optimizer()")
        _check_optimizer_arguments(optim, lr_sch)
        check_optimizer(optim)
        self._check_disjoint(optim)
        held = HeldOptimizer(f"optimizer.{len(self._optimizers)}", optim, lr_sch, manual)
        self.__dict__["_optimizers"] = (*self._optimizers, held)
        self._config.training = True
        self.__dict__["_version"] = self._version + 1

    def set_grad_scaler(self, scaler: torch.amp.GradScaler | StaticGradScaler | None) -> None:
        """Scale the loss of every `backward()` in build(), and unscale the gradients before anybody reads them.

        With a `torch.amp.GradScaler` a step whose gradients are infinite is skipped and the scale moves, all inside
        of the graph. None takes the scaler away. After a first step that was skipped the optimizer has the state that
        its first step will begin with, where eager mode has none yet.
        """
        self._check_initialised("set_grad_scaler()")
        if scaler is not None and not isinstance(scaler, (torch.amp.GradScaler, StaticGradScaler)):
            raise DefinitionError(
                f"set_grad_scaler() takes a scaler, got a {type(scaler).__name__}",
                hint="pass torch.amp.GradScaler(device) or mg.amp.StaticGradScaler(scale)",
            )
        self.__dict__.update(_scaler=scaler, _version=self._version + 1)

    def add_ema(self, module: nn.Module, decay: float | Callable[[int], float] = 0.999) -> None:
        """Keep an exponential moving average of a module's parameters, updated at the end of each step.

        The first update copies the parameters. `decay` may be a function of the number of updates so far. The numbers
        are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`.
        """
        self._check_initialised("add_ema()")
        found = {id(item): path for path, item in self._holdings().named_modules().items()}
        path = found.get(id(unwrap(module)))
        problem = None
        if path is None:
            problem = f"the {type(module).__name__} is not held by the graph"
        elif any(average.path == path for average in self._averages):
            problem = f"{path} has an average already"
        elif not all(parameter.is_floating_point() for parameter in unwrap(module).parameters()):
            problem = f"{path} has parameters that are not floating point"
        if problem is not None or path is None:
            raise DefinitionError(
                f"add_ema(): {problem}", hint="set self.model = model, then self.add_ema(self.model)"
            )
        average = Average(path, unwrap(module), decay)
        self.__dict__.update(_averages=(*self._averages, average), _version=self._version + 1)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the parameters have their averaged values, for evaluation; outside they are as before."""
        if not self._averages or self._swapped:
            problem, hint = (
                ("is inside of ema_weights() already", "leave the first ema_weights() before the second")
                if self._swapped
                else ("has no average", "call self.add_ema(self.model) in __init__")
            )
            raise DefinitionError(f"{self.name} {problem}", hint=hint)
        with ExitStack() as stack:
            for average in self._averages:
                stack.enter_context(average.swapped_in())
            stack.callback(self.__dict__.__setitem__, "_swapped", False)
            self.__dict__["_swapped"] = True
            yield

    # --- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self, *, python_random: bool = False) -> dict[str, Any]:
        """Everything that decides how training goes on, as one dict; its tensors are the live ones.

        Modules stand under the names of their attributes, in torch's format; `optimizer.0` and `scheduler.0` are in
        torch's format too; then come what was registered, the number of steps and the state of torch's random
        generators. `python_random=True` adds those of Python and NumPy.
        """
        with self._store.lock:
            return read_parts(self._parts(python_random=python_random))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over a state, at any time: all of it, or nothing if something does not fit.

        Live tensors are changed in place, so that builds stay. With `strict=True` every missing and unexpected entry
        is an error; with `strict=False` what is there is loaded by its name. Raises CheckpointError.
        """
        with self._store.lock:
            load_parts(self._parts(), state_dict, strict=strict)

    def register_state(self, name: str, obj: Stateful) -> None:
        """Make an object with `state_dict` and `load_state_dict` part of the graph's state, such as a data loader."""
        self._check_initialised("register_state()")
        lacking = [
            what for what in ("state_dict", "load_state_dict") if not callable(getattr(obj, what, None))
        ]
        if not isinstance(name, str) or not name or name in self._registered or lacking:
            problem = (
                f"a {type(obj).__name__} has no {lacking[0]}()"
                if lacking
                else f"{name!r} is registered already"
                if name in self._registered
                else f"{name!r} is no name"
            )
            raise DefinitionError(
                f"register_state(): {problem}",
                hint="pass a name of its own, and an object with state_dict() and load_state_dict()",
            )
        self.__dict__["_registered"] = {**self._registered, name: obj}

    def prove_resume(
        self, factory: str | Factory, *, steps: int = 3, more: int = 3, python_random: bool = False
    ) -> ResumeReport:
        """Prove that training from a checkpoint gives the bits of training without a break.

        `factory` is a function of a module, or its name "module:function" or "file.py:function". It returns a graph
        like this one and its batches, the same on each call: a tuple has the arguments of a step, a dict those with
        names. From the present state one new process trains `steps`, saves and trains `more`; another loads that and
        trains `more`. This graph is not touched.
        """
        start = self.state_dict(python_random=python_random)
        return prove_resume(factory, start=start, steps=steps, more=more, python_random=python_random)

    def _parts(self, *, python_random: bool = False) -> dict[str, Part]:
        self._check_not_swapped("saves or loads its state")
        contents = Contents(
            name=type(self).__name__,
            settings=self._config.settings,
            holdings=self._holdings(),
            store=self._store,
            declared=self._first_state,
            builds=self.builds,
            registered=self._registered,
            known_tensors=self._known_tensors,
            python_random=python_random,
        )
        return graph_parts(contents)

    # --- what a user looks at --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """`<class name>_<number>`."""
        return str(self._name)

    @property
    def config(self) -> GraphConfig:
        """The knobs of this graph."""
        return self._config  # type: ignore[no-any-return]

    @property
    def training(self) -> bool:
        """True if an optimizer was added."""
        return bool(self._optimizers)

    @property
    def is_compiled(self) -> bool:
        """True if there is at least one build."""
        return bool(self._cache.all)

    @property
    def builds(self) -> tuple[Build, ...]:
        """Every build, oldest first."""
        return tuple(self._cache.all)

    def show(self, stage: str = "final") -> str:
        """The newest build's program as runnable Python; `stage` is "final", "capture" or a pass."""
        if not self.builds:
            raise DefinitionError(f"{self.name} has no build yet", hint="call it, or compile(), first")
        stages = {item.name: item for item in self.builds[-1].stages}
        if stage != "final" and stage not in stages:
            raise DefinitionError(
                f"there is no stage {stage!r}", hint=f"stages: {', '.join([*stages, 'final'])}"
            )
        return self.builds[-1].program.text if stage == "final" else stages[stage].text

    def explain(self) -> str:
        """Why each build exists, and what it stands on: guards, constants, parameters without gradient."""
        return explain_text(self.name, self.builds)

    def __repr__(self) -> str:
        return graph_text(self.name, type(self).__name__, self._config, self._holdings(), self.builds)

    # --- attributes --------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_initialised(f"setting {name}")
        if isinstance(getattr(type(self), name, None), property):
            raise DefinitionError(f"{name!r} is a property of Graph", hint="use another attribute name")
        if isinstance(value, Optimizer) and not any(
            h.manual and h.optimizer is value for h in self._optimizers
        ):
            raise DefinitionError(
                f"an optimizer cannot be the attribute {name!r} of a Graph",
                hint="call self.add_optimizer(optimizer); one that build() steps itself: "
                "self.add_optimizer(optimizer, manual=True) first",
            )
        if isinstance(value, torch.Tensor):
            raise DefinitionError(
                f"a tensor cannot be the attribute {name!r} of a Graph",
                hint="hold it in an nn.Module, as a parameter or buffer, and set the module",
            )
        module = unwrap(value)
        if isinstance(module, nn.Module) or is_block(self.__dict__.get(name)):
            self.__dict__["_version"] = self._version + 1
        self.__dict__[name] = Block(name, module) if isinstance(module, nn.Module) else value

    def __delattr__(self, name: str) -> None:
        if is_block(self.__dict__.get(name)):
            self.__dict__["_version"] = self._version + 1
        object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        if "_name" not in self.__dict__:
            self._check_initialised(f"reading {name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        """Builds and locks stay behind: a copied or unpickled graph captures anew."""
        behind = ("_store", "_cache", "_first_state")
        state = {key: value for key, value in self.__dict__.items() if key not in behind}
        return state | {"_steps": self._store.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        steps = state.pop("_steps")
        self.__dict__.update(
            state, _store=StateStore(steps=steps), _cache=BuildCache(), _first_state=FirstState()
        )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_initialised(self, doing: str) -> None:
        if "_name" not in self.__dict__:
            raise DefinitionError(
                f"{type(self).__name__}.__init__ has not called super().__init__() before {doing}",
                where=user_place(),
                hint="make super().__init__() the first line of __init__",
            )

    def _check_usable(self) -> None:
        self._check_initialised("a call")
        outer = getattr(_RUNNING, "graph", None)
        if outer is not None:
            raise CaptureError(
                f"{self.name} is called inside build() of {outer}: graphs cannot be nested",
                where=user_place(),
                hint="call the module in build(), and keep one Graph around the whole step",
            )
        self._check_not_swapped("is called")
        if type(self).build is Graph.build:
            self.build()

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise DefinitionError(
                f"{self.name} {what} inside of its ema_weights()",
                hint="evaluate there with the model or with another graph; train, save and load outside",
            )

    def _check_disjoint(self, optim: Optimizer) -> None:
        owners = {
            id(parameter): held.name
            for held in self._optimizers
            for group in held.optimizer.param_groups
            for parameter in group["params"]
        }
        names = {
            id(parameter): f"{name}.{path}"
            for name, module in self._holdings().modules.items()
            for path, parameter in module.named_parameters()
        }
        for group in optim.param_groups:
            for parameter in group["params"]:
                if id(parameter) in owners:
                    known = names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                    raise OptimizerError(
                        f"{known} belongs to {owners[id(parameter)]} already; a second optimizer would update it twice",
                        hint="give each optimizer its own parameters",
                    )

    def _holdings(self) -> Holdings:
        modules = {name: unwrap(value) for name, value in self.__dict__.items() if is_block(value)}
        return Holdings(self, modules, self._optimizers, self._scaler, self._averages)

    def _build_for(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Build, list[Any]]:
        """The build that fits this call, made now if there is none, and the inputs of its program."""
        found: tuple[Build, list[Any]] | None = self._cache.find(self._key(call), call)
        if found is not None:
            return found
        build = self._compile(call, args, kwargs)
        return build, build.executor.bind(call.leaves)

    def _key(self, call: Call) -> Key:
        settings = self._config.settings
        whole = call.replicated if settings.accumulation_steps > 1 else None
        gradients = None
        if settings.keep_gradients:
            gradients = gradient_forms(kept_parameters(self._holdings(), settings))
        return (call.tree, call.keys, call.sharing, modes(whole, gradients)), settings, self._version

    def _compile(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
        check_count(self.build, args, kwargs)
        cache, number = self._cache, len(self._cache.all)
        reason = cache.reason(self._key(call), call)
        limit = self._config.settings.max_builds
        if limit is not None and number >= limit:
            raise CaptureError(
                f"{self.name} would need build {number + 1}: {reason}", hint=f"max_builds is {limit}"
            )
        request = self._request(call)
        try:
            with _inside(self):
                initialise_lazy(request)
                build = compile_step(request, reason=reason, number=number)
        except (CaptureError, TypeError, LookupError, AttributeError) as error:
            if (fault := self._misfit(call, error)) is None:
                raise
            what, where = (
                (error.message, error.where)
                if isinstance(error, MonographError)
                else (error, user_place_of(error))
            )
            raise SignatureError(fault, where=where, hint=f"build() failed with it: {what}") from error
        if number:
            level = logging.WARNING if number >= _MANY_BUILDS else logging.INFO
            LOGGER.log(level, "%s: build %d: %s", self.name, number, reason)
        cache.keep(self._key(call), build)
        self._store.refresh(build.guards.tensors)
        return build

    def _misfit(self, call: Call, error: BaseException) -> str | None:
        """How a call that failed differs from those that went well; None if that is not what the error is about."""
        if isinstance(error, MonographError) and type(error) is not CaptureError:
            return None
        return None if raised_by_user(error) else misfit(call, self._cache.signatures())

    def _request(self, call: Call) -> Request:
        return Request(self.name, self.build, call, self._holdings(), self._config.settings)

    def _run(self, build: Build, call: Call, inputs: list[Any]) -> Any:
        try:
            return build.executor.run(inputs, call.leaves, self._after(build))
        except RuntimeError as error:
            if build.executor.has_run or isinstance(error, (MonographError, torch.OutOfMemoryError)):
                raise
            build = self._recapture(build, call, error)
        return build.executor.run(build.executor.bind(call.leaves), call.leaves, self._after(build))

    def _recapture(self, build: Build, call: Call, error: RuntimeError) -> Build:
        """A first run failed: a fake kernel may have told a wrong layout. Trace again on real tensors."""
        LOGGER.warning("%s: the first run failed (%s); tracing on real tensors instead", self.name, error)
        try:
            with _inside(self):
                again = compile_step(
                    self._request(call),
                    reason=build.reason,
                    number=build.number,
                    capture_by=capture_with_values,
                )
        except MonographError:
            self._cache.drop(build)
            if (fault := self._misfit(call, error)) is not None:
                told = " ".join([str(error), *getattr(error, "__notes__", ())])
                raise SignatureError(fault, hint=f"the step failed with it: {told}") from error
            raise error from None
        self._cache.replace(build, again)
        return again

    def _after(self, build: Build) -> list[Callable[[], None]]:
        """What the host does once the new state is written: count the step, move the schedulers."""
        counted = self._store.steps + 1
        actions = [lambda: setattr(self._store, "steps", counted)]
        for held in self._optimizers:
            times = build.captured.steps.get(held.name, 0)
            if times:
                actions.append(partial(step_was_called, held.optimizer))
            if held.scheduler is not None:
                actions += [held.scheduler.step] * times
        actions += [partial(average.finish, average.updates) for average in self._averages]
        return actions


@contextmanager
def _inside(graph: Graph) -> Iterator[None]:
    _RUNNING.graph = graph.name
    try:
        yield
    finally:
        _RUNNING.graph = None


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


def _check_optimizer_arguments(optim: object, lr_sch: object) -> None:
    if not isinstance(optim, Optimizer):
        raise OptimizerError(
            f"add_optimizer() takes a torch.optim.Optimizer, got a {type(optim).__name__}",
            hint="pass the optimizer: self.add_optimizer(torch.optim.AdamW(self.model.parameters()))",
        )
    if isinstance(lr_sch, ReduceLROnPlateau):
        raise OptimizerError(
            "ReduceLROnPlateau cannot be lr_sch: its step() needs a value",
            hint="leave it out and call scheduler.step(metric) yourself after the graph; the graph follows the lr",
        )
    if lr_sch is not None and not hasattr(lr_sch, "optimizer"):
        raise OptimizerError(
            f"lr_sch takes a learning-rate scheduler, got a {type(lr_sch).__name__}",
            hint="pass one of torch.optim.lr_scheduler, made with this optimizer",
        )
    if lr_sch is not None and getattr(lr_sch, "optimizer", None) is not optim:
        raise OptimizerError(
            "lr_sch belongs to another optimizer", hint="make the scheduler with the optimizer that you add"
        )
