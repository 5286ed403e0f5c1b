"""What a user puts into a Graph: modules as attributes, optimizers, a gradient scaler, averages of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from monograph.amp import StaticGradScaler
from monograph.block import Block, is_block, unwrap
from monograph.capture.guards.sources.lookup import attributes_of
from monograph.capture.optimizers.tracing import check_optimizer
from monograph.capture.optimizers.wrapped import layers_of, parts_of
from monograph.config import GraphConfig
from monograph.errors import DefinitionError, OptimizerError, TornStateError, user_place
from monograph.state.averages import Average
from monograph.state.find import Owned, RegisteredOptimizer, nameless


class Definition:
    """The part of a Graph where modules, optimizers and averages are registered."""

    _block_kind: ClassVar[type[Block]] = Block

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

    # --- what is added by a call --------------------------------------------------------------------------------------

    def add_optimizer(
        self, optim: Optimizer, *, lr_sch: LRScheduler | None = None, manual: bool = False
    ) -> None:
        """Let the graph own an optimizer; its update is part of the step.

        `lr_sch` is stepped in Python once per optimizer step. With `manual=True` build() itself calls
        `optim.step()`.
        """
        self._check_initialised("add_optimizer()")
        inner, wrapper = parts_of(optim)
        _check_scheduler(optim, lr_sch)
        check_optimizer(inner)
        self._check_disjoint(inner)
        held = RegisteredOptimizer(f"optimizer.{len(self._optimizers)}", inner, lr_sch, manual, wrapper)
        self.__dict__["_optimizers"] = (*self._optimizers, held)
        self._config.training = True
        self._mistakes.optimizer_added(self._owned())
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
        found = {id(item): path for path, item in self._owned().named_modules().items()}
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

    # --- attributes --------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_initialised(f"setting {name}")
        if isinstance(getattr(type(self), name, None), property):
            raise DefinitionError(f"{name!r} is a property of Graph", hint="use another attribute name")
        if isinstance(value, Optimizer) and not any(
            h.manual and value in layers_of(h.stepped) for h in self._optimizers
        ):
            raise DefinitionError(
                f"an optimizer cannot be the attribute {name!r} of a Graph",
                hint="call self.add_optimizer(optimizer); one that build() steps itself: "
                "self.add_optimizer(optimizer, manual=True) first",
            )
        if isinstance(value, torch.Tensor) and (value.requires_grad or isinstance(value, nn.Parameter)):
            raise DefinitionError(
                f"a tensor that requires grad cannot be the attribute {name!r} of a Graph",
                hint="hold it in an nn.Module, as a parameter, and set the module",
            )
        module = unwrap(value)
        if isinstance(module, nn.Module) and ("." in name or not name):
            raise DefinitionError(
                f"a module cannot be the attribute {name!r} of a Graph: the name is the first part of the paths in it",
                hint="choose a name without a dot, or hold several modules in an nn.ModuleDict",
            )
        if isinstance(module, nn.Module) or is_block(self.__dict__.get(name)):
            self.__dict__["_version"] = self._version + 1
        self.__dict__[name] = self._block_kind(name, module) if isinstance(module, nn.Module) else value

    def __delattr__(self, name: str) -> None:
        if is_block(self.__dict__.get(name)):
            self.__dict__["_version"] = self._version + 1
        object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        if "_name" not in self.__dict__:
            self._check_initialised(f"reading {name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_initialised(self, doing: str) -> None:
        if "_name" not in self.__dict__:
            raise DefinitionError(
                f"{type(self).__name__}.__init__ has not called super().__init__() before {doing}",
                where=user_place(),
                hint="make super().__init__() the first line of __init__",
            )

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise DefinitionError(
                f"{self.name} {what} inside of its ema_weights()",
                hint="evaluate there with the model or with another graph; train, save and load outside",
            )

    def _check_whole(self) -> None:
        if self._store.torn:
            raise TornStateError(
                f"{self.name} cannot go on: {self._store.torn}",
                hint="load a checkpoint with load_state_dict(); the state of before that step is gone",
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
            for name, module in self._owned().modules.items()
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

    def _modules(self) -> dict[str, nn.Module]:
        return {name: unwrap(value) for name, value in self.__dict__.items() if is_block(value)}

    def _owned(self) -> Owned:
        return Owned(
            self,
            self._modules(),
            self._optimizers,
            self._scaler,
            self._averages,
            private=self._private,
            unwrap=unwrap,
        )


def _check_scheduler(optim: object, lr_sch: object) -> None:
    if isinstance(lr_sch, ReduceLROnPlateau):
        raise OptimizerError(
            "ReduceLROnPlateau cannot be lr_sch: its step() needs a value",
            hint="leave it out and call scheduler.step(metric) yourself after the graph; the graph follows the lr",
        )
    if lr_sch is not None and not hasattr(lr_sch, "optimizer"):
        inside = next(
            (name for name, item in (attributes_of(lr_sch) or {}).items() if isinstance(item, LRScheduler)),
            "",
        )
        raise OptimizerError(
            f"lr_sch takes a learning-rate scheduler, got a {type(lr_sch).__name__}",
            hint=f"pass the one inside: lr_sch=scheduler.{inside}"
            if inside
            else "pass one of torch.optim.lr_scheduler, made with this optimizer",
        )
    if lr_sch is not None and getattr(lr_sch, "optimizer", None) not in layers_of(optim):
        raise OptimizerError(
            "lr_sch belongs to another optimizer", hint="make the scheduler with the optimizer that you add"
        )
