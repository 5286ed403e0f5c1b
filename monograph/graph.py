"""Graph: the user's class. What it does is in other files; here it forwards to them, and says what may be an attribute."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monograph import inspected
from monograph.amp import StaticGradScaler
from monograph.block import Block
from monograph.call import call, call_eagerly, compile_only
from monograph.compat.modes import opaque_to_dynamo
from monograph.compiler import Build
from monograph.config import GraphConfig
from monograph.errors import DefinitionError, MissingBuildError, no_attribute
from monograph.inspect.printed.debug import debug_options
from monograph.inspect.printed.text import graph_text
from monograph.internals.internals import RUNNING, Internals, internals_of
from monograph.internals.registry import Kind, one_scheduler
from monograph.ir.call.parameters import check_is_no_module, check_runs_at_once
from monograph.ir.probes import Probes
from monograph.ir.text import clipped, pre
from monograph.many import many_steps
from monograph.user_code.lines import user_place

if TYPE_CHECKING:  # what looks at a graph is imported when it is asked for
    from monograph.resume.factory import Factory
    from monograph.resume.proof import ResumeReport
    from monograph.state_dict.loading import LeftOut, Stateful

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)
_CALLS = ("step", "run", "train_step", "training_step", "fit")  # names of a step elsewhere
_CALL_IT = "a step is a call of the graph itself: step(x, y)"
_OF_MODULES = frozenset(name for name in dir(nn.Module) if not name.startswith("_"))


class Graph:
    """A training or inference step as one static graph. Subclass it and write `build`.

    The first call captures the whole step; later calls replay it with the numbers of eager mode.

    >>> class Double(Graph):
    ...     def build(self, x):
    ...         return x * 2
    >>> Double()(torch.ones(2))
    tensor([2., 2.])
    """

    _monograph: Internals  # of an instance: all that it has besides the user's attributes
    _monograph_kind: ClassVar[Kind] = Kind()

    def __init_subclass__(
        cls, *, block: type[Block] | None = None, last: str | None = None, **kwargs: Any
    ) -> None:
        """`block` is what modules are shown as; `last` a name that the last argument of a call may have."""
        super().__init_subclass__(**kwargs)
        check_is_no_module(cls)
        cls._monograph_kind = cls._monograph_kind.of_subclass(block, last)
        if "build" in cls.__dict__:
            check_runs_at_once(cls.__dict__["build"], f"build() of {cls.__name__}")
            cls.build = _guarded(cls.__dict__["build"])  # type: ignore[method-assign]

    def __init__(self) -> None:
        kind = type(self)._monograph_kind
        self.__dict__["_monograph"] = Internals(self, kind, f"{type(self).__name__}_{next(kind.numbers)}")

    # --- what a user writes and calls --------------------------------------------------------------------------------

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step, as eager code. Override it."""
        raise MissingBuildError(
            f"{type(self).__name__} does not define build()",
            hint=_instead_of_build(type(self))
            or "write the step there: def build(self, x, y): loss = ...; loss.backward(); return loss",
        )

    build.__isabstractmethod__ = True  # type: ignore[attr-defined]
    __call__ = opaque_to_dynamo(call)
    many = opaque_to_dynamo(many_steps)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Capture and compile without running; arguments are tensors or `mg.spec(shape, dtype)`.

        A size that is an `mg.Dim` may vary in what is saved or exported of the graph. The graph itself makes a build
        for each size that it is called with.
        """
        compile_only(self, args, kwargs)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The same step run eagerly, as the reference. Gradients are left as a step of the graph leaves them."""
        return call_eagerly(self._monograph, args, kwargs)

    # --- what is added by a call -------------------------------------------------------------------------------------

    def add_optimizer(
        self,
        optim: _Optimizer,
        *,
        lr_sch: LRScheduler | None = None,
        lr_scheduler: LRScheduler | None = None,
        manual: bool = False,
    ) -> _Optimizer:
        """Let the graph own an optimizer; its update is part of the step. Returns the optimizer that it is given.

        `lr_sch`, which may be written `lr_scheduler`, is stepped in Python once per optimizer step. With `manual=True`
        build() itself calls `optim.step()`. Raises DefinitionError for a scheduler under both names.

        >>> import monograph as mg
        >>> layer = nn.Linear(3, 2)
        >>> optimizer = mg.trace(layer).add_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
        >>> optimizer.param_groups[0]["lr"]
        0.1
        """
        inside = _initialised(self, "add_optimizer()")
        scheduler, called = one_scheduler("add_optimizer()", lr_sch, lr_scheduler)
        inside.registry.add_optimizer(optim, scheduler, called, manual=manual)
        inside.mistakes.optimizer_added(inside.owned())
        return optim

    def set_grad_scaler(self, scaler: torch.amp.GradScaler | StaticGradScaler | None) -> None:
        """Scale the loss of every `backward()` in build(), and unscale the gradients before anybody reads them.

        With a `torch.amp.GradScaler` a step with infinite gradients is skipped and the scale moves, inside of the graph;
        None takes it away. After a skipped first step the optimizer has the state that its first step will begin with.
        """
        _initialised(self, "set_grad_scaler()").registry.set_scaler(scaler)

    def add_ema(self, module: nn.Module, decay: float | Callable[[int], float] = 0.999) -> None:
        """Keep an exponential moving average of a module's parameters, updated at the end of each step.

        The first update copies the parameters. `decay` may be a function of the number of updates so far. The numbers
        are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`.
        """
        _initialised(self, "add_ema()").registry.add_average(module, decay)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Inside, the parameters have their averaged values, for evaluation; outside they are as before."""
        return self._monograph.registry.averaged()

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """`<class name>_<number>`."""
        return self._monograph.name

    @property
    def config(self) -> GraphConfig:
        """The knobs of this graph."""
        return self._monograph.registry.config

    @property
    def training(self) -> bool:
        """True if an optimizer was added."""
        return bool(self._monograph.registry.optimizers)

    steps = inspected.StepCount()

    @property
    def is_compiled(self) -> bool:
        """True if there is at least one build."""
        return bool(self._monograph.builds)

    @property
    def backend(self) -> str:
        """What the newest build runs on; before there is one, what the configuration asks for."""
        return (*[build.backend for build in self.builds[-1:]], self._monograph.settings.backend)[0]

    @property
    def builds(self) -> tuple[Build, ...]:
        """Every build, oldest first."""
        return self._monograph.builds

    # --- its state ---------------------------------------------------------------------------------------------------

    def state_dict(self, *, python_random: bool = False) -> dict[str, Any]:
        """Everything that decides how training goes on, as one dict; its tensors are the live ones.

        Modules are under the names of their attributes, in torch's format as `optimizer.0` and `scheduler.0`; then come
        what was registered, the number of steps, torch's random generators, and with `python_random=True` those of
        Python and NumPy.
        """
        from monograph.state_dict.parts import read_state

        return read_state(self._monograph, python_random=python_random)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LeftOut:
        """Take over a state, at any time: all of it, or nothing if something does not fit.

        Live tensors are changed in place, so that builds stay. With `strict=True` every missing and unexpected entry is an
        error, else what is there is loaded by its name. Gives `missing_keys`, `unexpected_keys`. Raises CheckpointError.
        """
        from monograph.state_dict.parts import load_state

        return load_state(self._monograph, state_dict, strict=strict)

    def register_state(self, name: str, obj: Stateful) -> None:
        """Make an object with `state_dict` and `load_state_dict` part of the graph's state, such as a data loader."""
        _initialised(self, "register_state()").registry.add_state(name, obj)

    def prove_resume(
        self, factory: str | Factory, *, steps: int = 3, more: int = 3, python_random: bool = False
    ) -> ResumeReport:
        """Prove that training from a checkpoint gives the bits of training without a break.

        `factory` is a function of a module, or its name "module:function" or "file.py:function". It returns a graph
        like this one and its batches, the same on each call: a tuple has the arguments of a step, a dict those with
        names. From the present state one new process trains `steps`, saves and trains `more`; another loads that and
        trains `more`. This graph is not touched.
        """
        from monograph.resume.proof import prove_resume

        start = self.state_dict(python_random=python_random)
        return prove_resume(factory, start=start, steps=steps, more=more, python_random=python_random)

    # --- what looks at it, and changes nothing -----------------------------------------------------------------------

    show, diff, explain, summary = inspected.show, inspected.diff, inspected.explain, inspected.summary
    memory, max_batch, profile = inspected.memory, inspected.max_batch, inspected.profile
    verify, find_nonfinite, replay = inspected.verify, inspected.find_nonfinite, inspected.replay
    plan, to_html, draw = inspected.plan, inspected.to_html, inspected.draw

    def __repr__(self) -> str:
        owned, kind = self._monograph.owned(), type(self).__name__
        lines = self._monograph.debug.op_repr_with_py_stack
        return graph_text(self.name, kind, self.config, owned, self.builds, lines_of_ops=lines)

    def debug(
        self,
        v_level: int = 0,
        *,
        ranks: int | Sequence[int] | None = None,
        max_py_stack_depth: int = 2,
        only_user_py_stack: bool = True,
        op_repr_with_py_stack: bool = False,
    ) -> None:
        """Report on the terminal, and in the log `monograph.debug`, what the next compilations do while they do it.

        Level 0 reports the stages with their seconds, 1 also each module with its tensors, 2 each op as it is recorded,
        3 each op with the user's lines, at most `max_py_stack_depth`; -1 reports nothing. `ranks` says which processes
        report: one, a list, -1 for all; the first by default. `only_user_py_stack=False` shows torch's lines too, and
        `op_repr_with_py_stack` puts the lines into `print(graph)`. Raises DefinitionError.
        """
        self._monograph.debug = debug_options(
            v_level, ranks, max_py_stack_depth, only_user_py_stack, op_repr_with_py_stack
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(clipped(str(self.summary())))

    def _repr_html_(self) -> str:
        return pre(str(self.summary()))

    def probes(self) -> Probes:
        """What `mg.probe` recorded in the steps so far, by the name of the probe."""
        return Probes(self._monograph.probes.read())

    # --- attributes and copies ---------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        registry = _initialised(self, f"setting {name}").registry
        if isinstance(getattr(type(self), name, None), property):
            raise DefinitionError(f"{name!r} is a property of Graph", hint="use another attribute name")
        self.__dict__[name] = registry.attribute(name, value)

    def __delattr__(self, name: str) -> None:
        _initialised(self, f"deleting {name}").registry.forget_module(name)
        object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        if "_monograph" not in self.__dict__:
            _initialised(self, "a call" if name == "_monograph" else f"reading {name}")
        if name in _OF_MODULES:
            raise DefinitionError(
                f"{type(self).__name__!r} object has no attribute {name!r}: a Graph is no module",
                hint=f"ask the model itself, for example step.model.{name}; the graph follows it",
            )
        raise no_attribute(self, name, _CALL_IT if name in _CALLS else "")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_monograph": self._monograph.saved()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = Internals.restored(self, type(self)._monograph_kind, state)
        self.__dict__.update(state, _monograph=made)


def _instead_of_build(cls: type) -> str:
    """What to say of the method that is the step under another name; nothing if no method may be that."""
    own = [
        name
        for base in cls.__mro__[: cls.__mro__.index(Graph)]
        for name, item in vars(base).items()
        if inspect.isfunction(item) and not name.startswith("_") and name not in vars(Graph)
    ]
    meant = get_close_matches("build", own, n=1) or (own if len(own) == 1 else [])
    return f"rename {meant[0]}() to build(), if that is the step" if meant else ""


def _guarded(build: Callable[..., Any]) -> Callable[..., Any]:
    """build() with a warning when it is called by hand."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(RUNNING, "graph", None) is None and "_monograph" in self.__dict__:
            warnings.warn(
                f"build() of {self.name} was called directly: it runs eagerly, once; call the graph itself instead",
                stacklevel=2,
            )
        return build(self, *args, **kwargs)

    run.__wrapped__ = build  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__qualname__ = build.__name__, build.__doc__, build.__qualname__
    return run


def _initialised(graph: Any, doing: str) -> Internals:
    """The inside of a graph. Raises DefinitionError if it has none yet."""
    if "_monograph" not in graph.__dict__:
        raise DefinitionError(
            f"{type(graph).__name__}.__init__ has not called super().__init__() before {doing}",
            where=user_place(),
            hint="make super().__init__() the first line of __init__",
        )
    return internals_of(graph)
