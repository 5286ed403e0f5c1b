"""What a user puts into a graph: modules as attributes, optimizers, a gradient scaler, averages of weights, other state."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from monograph.amp import StaticGradScaler
from monograph.block import Block, hold, is_block, unwrap
from monograph.capture.effects.gradients import OldGradientError
from monograph.capture.guards.sources.attributes import attributes_of
from monograph.capture.optimizers.tracing import check_optimizer
from monograph.capture.optimizers.wrapped import layers_of, parts_of
from monograph.capture.trace import LOGGER
from monograph.config import GraphConfig
from monograph.errors import DefinitionError, OptimizerError, shown
from monograph.ir.call.signature import Version
from monograph.state.averages import Average
from monograph.state.find import Owned, RegisteredOptimizer, nameless


@dataclass(frozen=True)
class Kind:
    """How it shows modules, and the name that its last argument may have."""

    block: type[Block] = Block
    last: str | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the graphs, for their names

    def of_subclass(self, block: type[Block] | None, last: str | None) -> Kind:
        """What a class below says; None for what it says nothing of."""
        return Kind(block or self.block, last or self.last)


class Registry:
    """What one graph holds besides its attributes, and the checks of both.

    A trace leaves `vars()` of it as they were. The version goes on: a step that registers something is captured each time.
    """

    __slots__ = ("__dict__", "version")

    def __init__(self, graph: Any, name: str, block: type[Block], private: frozenset[str]) -> None:
        self._graph = weakref.ref(graph)  # which holds this
        self._block = block  # what modules are shown as
        self._private = private  # the attributes of the graph that no step reads
        self.name = name
        self.config = GraphConfig()
        self.optimizers: tuple[RegisteredOptimizer, ...] = ()
        self.scaler: torch.amp.GradScaler | StaticGradScaler | None = None
        self.averages: tuple[Average, ...] = ()
        self.registered: dict[str, Any] = {}  # by the user: objects that have a state of their own
        self.known_tensors: set[str] = set()  # the paths of loaded attributes
        self.whole: dict[str, str] = {}  # what was found out about optimizers, once: see Owned
        self.as_written = False  # build() is a function that was written for eager mode
        self.version = Version()  # of what is held: builds are made for one
        self.swapped = False  # parameters have their averaged values

    @property
    def graph(self) -> Any:
        """The graph itself."""
        graph = self._graph()
        assert graph is not None
        return graph

    # --- what there is -----------------------------------------------------------------------------------------------

    def modules(self) -> dict[str, nn.Module]:
        """The modules, by the names of the attributes that they are."""
        return {name: unwrap(value) for name, value in vars(self.graph).items() if is_block(value)}

    def owned(self) -> Owned:
        """All that the graph holds now."""
        return Owned(
            self.graph,
            self.modules(),
            self.optimizers,
            self.scaler,
            self.averages,
            private=self._private,
            table=vars(self),
            unwrap=unwrap,
            whole=self.whole,
            as_written=self.as_written,
        )

    def let_gradients_stay(self, error: OldGradientError, *, is_first: bool) -> None:
        """Keep gradients from now on if the first step that is written for eager mode uses old ones; raise the error if not."""
        if not self.as_written or self.config.settings.keep_gradients or not is_first:
            raise error
        LOGGER.info("%s: gradients stay from call to call, by config.keep_gradients(): %s", self.name, error)
        self.config.keep_gradients()

    # --- what is added -----------------------------------------------------------------------------------------------

    def add_optimizer(
        self, optim: Optimizer, scheduler: LRScheduler | None, called: str, *, manual: bool
    ) -> None:
        """Hold an optimizer, with its scheduler; `called` is the argument by which that was given."""
        inner, wrapper = parts_of(optim)
        if scheduler is not None:
            _check_scheduler(optim, scheduler, called)
        check_optimizer(inner)
        self._check_disjoint(inner)
        name = f"optimizer.{len(self.optimizers)}"
        registered = RegisteredOptimizer(name, inner, scheduler, manual, wrapper, called)
        self.optimizers = (*self.optimizers, registered)
        self.config.training = True
        self.version = self.version.after(name)

    def set_scaler(self, scaler: torch.amp.GradScaler | StaticGradScaler | None) -> None:
        """Hold a scaler in the place of the one before."""
        if scaler is not None and not isinstance(scaler, (torch.amp.GradScaler, StaticGradScaler)):
            raise DefinitionError(
                f"set_grad_scaler() takes a scaler, got a {type(scaler).__name__}",
                hint="pass torch.amp.GradScaler(device) or mg.amp.StaticGradScaler(scale)",
            )
        self.scaler = scaler
        self.version = self.version.after("the gradient scaler")

    def add_average(self, module: nn.Module, decay: float | Callable[[int], float]) -> None:
        """Hold an average of a module."""
        found = {id(item): path for path, item in self.owned().named_modules().items()}
        path = found.get(id(unwrap(module)))
        problem = None
        if path is None:
            problem = f"the {type(module).__name__} is not held by the graph"
        elif any(average.path == path for average in self.averages):
            problem = f"{path} has an average already"
        elif not all(parameter.is_floating_point() for parameter in unwrap(module).parameters()):
            problem = f"{path} has parameters that are not floating point"
        if problem is not None or path is None:
            raise DefinitionError(
                f"add_ema(): {problem}", hint="set self.model = model, then self.add_ema(self.model)"
            )
        self.averages = (*self.averages, Average(path, unwrap(module), decay))
        self.version = self.version.after(f"ema.{path}")

    def add_state(self, name: str, item: Any) -> None:
        """Hold an object that has a state of its own."""
        lacking = [
            what for what in ("state_dict", "load_state_dict") if not callable(getattr(item, what, None))
        ]
        if not isinstance(name, str) or not name or name in self.registered or lacking:
            named = type(item).__name__
            article = "an" if named[:1].lower() in "aeiou" else "a"
            kind = f"the class {item.__name__}" if isinstance(item, type) else f"{article} {named}"
            problem = (
                f"{kind} has no {lacking[0]}()"
                if lacking
                else f"{shown(name)} is registered already"
                if name in self.registered
                else f"{shown(name)} is no name"
            )
            raise DefinitionError(
                f"register_state(): {problem}",
                hint=f"make it an attribute, graph.{name} = ...: there generators are saved, and lists and dicts of numbers that build() changes"
                if isinstance(item, (torch.Generator, list, dict))
                else ("pass " if lacking else "pass a name of its own, and ")
                + "an object with state_dict() and load_state_dict(); of data loaders "
                "torchdata.stateful_dataloader.StatefulDataLoader has them",
            )
        self.registered = {**self.registered, name: item}

    def attribute(self, name: str, value: Any) -> Any:
        """What the graph keeps for an attribute that is set: a block for a module, else the value. Raises DefinitionError."""
        if isinstance(value, Optimizer) and not any(
            h.manual and value in layers_of(h.stepped) for h in self.optimizers
        ):
            is_added = any(value in layers_of(held.stepped) for held in self.optimizers)
            raise DefinitionError(
                f"an optimizer cannot be the attribute {shown(name)} of a Graph",
                hint="leave the attribute out: the graph has the optimizer, and steps it after build(); if build() itself "
                "is to step it: self.add_optimizer(optimizer, manual=True)"
                if is_added
                else "call self.add_optimizer(optimizer) instead: the graph has it then, and steps it after build(); if build() itself "
                "is to step it, write self.add_optimizer(optimizer, manual=True) before this line",
            )
        is_parameter = isinstance(value, nn.Parameter)
        if is_parameter or (isinstance(value, torch.Tensor) and value.requires_grad):
            is_made = value.grad_fn is not None
            raise DefinitionError(
                f"a tensor that requires grad cannot be the attribute {shown(name)} of a Graph",
                hint=f"return it from build(), or keep its values: self.{name} = x.detach()"
                if is_made
                else f"hold it in an nn.Module: self.{name} = nn.ParameterList([x])"
                + ("" if is_parameter else ", with x = nn.Parameter(x) before an optimizer gets it"),
            )
        module = unwrap(value)
        if not isinstance(module, nn.Module):
            self.forget_module(name)
            return value
        if "." in name or not name:
            raise DefinitionError(
                f"a module cannot be the attribute {shown(name)} of a Graph: the name is the first part of the paths in it",
                hint="choose a name without a dot, or hold several modules in an nn.ModuleDict",
            )
        self.version = self.version.after(f"graph.{name}")
        block = self._block(name, module)
        hold(block, self)
        return block

    def adopt(self, attributes: Iterable[Any], version: Version) -> None:
        """Hold the blocks among the attributes of a graph that is a copy, as the graph that it is a copy of."""
        for block in filter(is_block, attributes):
            hold(block, self)
        self.version = version

    def is_checkpointed(self, path: str) -> bool:
        """True if backward computes again what the module at this path makes."""
        return path in self.config.settings.checkpointed

    def set_checkpointed(self, path: str, mode: bool) -> None:
        """Say whether it does."""
        others = [item for item in self.config.settings.checkpointed if item != path]
        checkpointed = tuple(sorted([*others, path] if mode else others))
        self.config.settings = replace(self.config.settings, checkpointed=checkpointed)

    def stage_of(self, path: str) -> int | None:
        """The stage of the module at this path; None if it was not set."""
        return dict(self.config.settings.stages).get(path)

    def set_stage(self, path: str, stage: int | None, ranks: Sequence[int] | None) -> None:
        """Say which it is, and on which processes."""
        settings = self.config.settings
        stages = {other: found for other, found in settings.stages if other != path}
        placed = {other: found for other, found in settings.placements if other != path}
        if stage is not None:
            stages[path] = stage
            placed |= {} if ranks is None else {path: tuple(ranks)}
        self.config.settings = replace(
            settings, stages=tuple(sorted(stages.items())), placements=tuple(sorted(placed.items()))
        )

    def forget_module(self, name: str) -> None:
        """An attribute is set or deleted: if it was a module, the graph holds that no longer."""
        if is_block(vars(self.graph).get(name)):
            self.version = self.version.after(f"graph.{name}")

    # --- averages ----------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters have their averaged values."""
        if not self.averages or self.swapped:
            problem, hint = (
                ("is inside of ema_weights() already", "leave the first ema_weights() before the second")
                if self.swapped
                else ("has no average", "call self.add_ema(self.model) in __init__")
            )
            raise DefinitionError(f"{self.name} {problem}", hint=hint)
        with ExitStack() as stack:
            for average in self.averages:
                stack.enter_context(average.swapped_in())
            stack.callback(setattr, self, "swapped", False)
            self.swapped = True
            yield

    def check_not_swapped(self, what: str) -> None:
        """Raise DefinitionError if the parameters have their averaged values."""
        if self.swapped:
            raise DefinitionError(
                f"{self.name} {what} inside of its ema_weights()",
                hint="evaluate there with the model or with another graph; train, save and load outside",
            )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_disjoint(self, optim: Optimizer) -> None:
        owners = {
            id(parameter): registered.name
            for registered in self.optimizers
            for group in registered.optimizer.param_groups
            for parameter in group["params"]
        }
        names = {
            id(parameter): f"{name}.{path}"
            for name, module in self.modules().items()
            for path, parameter in module.named_parameters()
        }
        for group in optim.param_groups:
            for parameter in group["params"]:
                if id(parameter) in owners:
                    known = names.get(id(parameter)) or nameless(parameter)
                    raise OptimizerError(
                        f"{known} belongs to {owners[id(parameter)]} already; a second optimizer would update it twice",
                        hint="give each optimizer its own parameters",
                    )


def one_scheduler(
    function: str, lr_sch: LRScheduler | None, lr_scheduler: LRScheduler | None
) -> tuple[LRScheduler | None, str]:
    """The scheduler that a function is given under one of its two names, and that name; DefinitionError under both."""
    if lr_sch is not None and lr_scheduler is not None:
        raise DefinitionError(
            f"{function} is given lr_sch and lr_scheduler, which are two names of one argument",
            hint="leave one out; an optimizer that several schedulers move takes a ChainedScheduler or a SequentialLR",
        )
    return (lr_sch, "lr_sch") if lr_scheduler is None else (lr_scheduler, "lr_scheduler")


def _check_scheduler(optim: object, scheduler: object, called: str) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise OptimizerError(
            f"ReduceLROnPlateau cannot be {called}: its step() needs a value",
            hint="leave it out and call scheduler.step(metric) yourself after the graph; the graph follows the lr",
        )
    if not hasattr(scheduler, "optimizer"):
        inside = next(
            (
                name
                for name, item in (attributes_of(scheduler) or {}).items()
                if isinstance(item, LRScheduler)
            ),
            "",
        )
        raise OptimizerError(
            f"{called} takes a learning-rate scheduler, got a {type(scheduler).__name__}",
            hint=f"pass the one inside: {called}=scheduler.{inside}"
            if inside
            else "pass one of torch.optim.lr_scheduler, made with this optimizer",
        )
    if scheduler.optimizer not in layers_of(optim):
        raise OptimizerError(
            f"{called} belongs to another optimizer",
            hint="make the scheduler with the optimizer that you add",
        )
