"""What users most likely do not mean, and eager mode would not report either. Each is a warning, once per graph."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from monograph.checkpoint.steps.open_runs import OpenRuns
from monograph.compat.optimizers import schedulers_inside, watch_clipping
from monograph.compat.tensors import version_of
from monograph.state.find import Owned, RegisteredOptimizer
from monograph.state.stepped_besides import StepLeft, state_tensors, step_left
from monograph.user_code.lines import warn_at_user_line

_NUM_SHOWN = 3  # names in a list
_STEPS = 16  # of a graph after which its schedulers are looked at less closely: a loop that steps them each time has done so
_LOCK = threading.Lock()
_CAPTURING = threading.local()  # the mistakes of the graph that this thread has captured last, and its name
Modules = Callable[[], Mapping[str, nn.Module]]  # those that a graph holds
Places = list[tuple[LRScheduler, int]]  # how far schedulers are ahead of the steps of a graph
# where graphs have left the schedulers that they step; several may step one
_LEFT_AT: weakref.WeakKeyDictionary[LRScheduler, _Left] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Left:
    """Where a graph has left a scheduler, and the sum of the versions of all that the optimizer updates."""

    place: int
    versions: int


@dataclass(frozen=True)
class _Stepped:
    """A parameter that a graph has updated, with its gradient as the step has left it."""

    parameter: weakref.ref[torch.Tensor]
    gradient: int  # its id, and version; 0 for none
    version: int

    def is_left(self, parameter: torch.Tensor) -> bool:
        """True if nothing has touched the gradient since."""
        gradient = parameter.grad
        if self.parameter() is not parameter or gradient is None:
            return self.parameter() is parameter and not self.gradient
        return id(gradient) == self.gradient and version_of(gradient) == self.version


class Mistakes:
    """What one graph has seen of how it is used, and what it has warned of."""

    _looking: ClassVar[list[weakref.ref[Mistakes]]] = []  # those whose graphs have made their first step
    _watching: ClassVar[bool] = False

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._modes: set[bool] = set()
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # parameters of when an optimizer was added
        self._roots: dict[int, list[weakref.ref[nn.Module]]] = {}  # by number of the build
        self._stepped: dict[int, _Stepped] = {}  # by the first step
        self._left: list[StepLeft] = []  # by the first step
        self._graph = ""
        self._steps = 0
        self.is_young = True  # in the first steps, which are looked at more closely
        self._until = _STEPS  # so long
        self.ahead: Places | None = None
        # by number of a build the modules that it trains, and the modes that these had
        self.watched: dict[int, list[tuple[weakref.ref[nn.Module], bool]]] = {}

    def optimizer_added(self, owned: Owned) -> None:
        """Note the parameters that there are."""
        for module in owned.modules.values():
            self._known.update({id(parameter): weakref.ref(parameter) for parameter in module.parameters()})

    def before_capture(self, graph: str, owned: Owned) -> None:
        """Warn of parameters that came into modules after the optimizer was added, and are in none."""
        # without an optimizer the gradients are those that other code has made
        _CAPTURING.mistakes = weakref.ref(self) if owned.optimizers else None
        _CAPTURING.graph = graph
        with _LOCK:
            if not Mistakes._watching:
                watch_clipping(lambda: bool(Mistakes._looking), _look_at_all, _look_inside)
                Mistakes._watching = True
        if not self._known or "parameters" in self._reported or not owned.optimizers:
            return
        updated = {id(parameter) for registered in owned.optimizers for parameter in registered.parameters}
        new = [
            f"{root}.{name}"
            for root, module in owned.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in updated and not self._knows(parameter)
        ]
        if new:
            self._tell(
                "parameters",
                f"{_listed(new)}: {graph} trains without updating what came into the model after its optimizer was "
                "made; make the optimizer when the model is complete, or call optimizer.add_param_group()",
            )

    def note_places(self, optimizers: Sequence[RegisteredOptimizer], steps: int) -> Places:
        """Note how far the schedulers of optimizers are ahead of the steps that the graph has made."""
        counting = (_counting(item.scheduler) for item in optimizers)
        self.ahead = [(item, item.last_epoch - steps) for item in counting if isinstance(item, LRScheduler)]
        return self.ahead

    def look_again(self, steps: int) -> None:
        """A scheduler was stepped besides, as at the end of an epoch: the next epoch is looked at closely, once."""
        self.ahead = []
        self.is_young, self._until = True, self._steps + 2 * steps

    def before_first_step(self, graph: str) -> None:
        """Warn of checkpoints of another run, beside which those of this one cannot be saved."""
        for path in OpenRuns.of_other_runs():
            self._tell(
                "checkpoints",
                f'{graph} makes its first step, and "{path.parent}" holds {path.name} of another run: save() will refuse all '
                "steps up to that one. To go on with that run, load what latest() of the CheckpointManager gives; to begin "
                "anew, give this run a directory of its own; CheckpointManager(..., rewind=True) removes what is in the way",
            )

    def before_step(
        self,
        graph: str,
        optimizers: Sequence[RegisteredOptimizer],
        modules: Modules,
        number: int,
        steps: Iterable[str],
    ) -> None:
        """Look at what has happened since the last step; `steps` are the optimizers that build `number` steps."""
        if not steps:
            return
        for registered in optimizers:
            left = (
                _LEFT_AT.get(registered.scheduler) if isinstance(registered.scheduler, LRScheduler) else None
            )
            moved = left is not None and _place_of(registered.scheduler) == left.place + 1
            if left is not None and moved and _versions(registered) == left.versions:
                self._tell(
                    "scheduler",
                    f"{graph} steps the {type(registered.scheduler).__name__} that it was given as "
                    f"{registered.scheduler_name}, and your code steps it too: the learning rate moves twice; leave out "
                    f"scheduler.step(), or do not pass {registered.scheduler_name}",
                )
        if any(left.is_stepped() for left in self._left):
            self._tell(
                "step",
                f"{graph} has made its step, and your code calls optimizer.step() after it, on the gradients that "
                "config.keep_gradients() leaves: parameters move twice; leave out optimizer.step(), or step in build(), "
                "after add_optimizer(optimizer, manual=True)",
            )
        self._left = []
        self.watched[number] = []
        if "mode" not in self._reported:
            roots = self._trained(optimizers, modules, number, set(steps))
            self._look_at_modes(graph, roots)
            self.watched[number] = [(weakref.ref(root), root.training) for root in roots]

    def after_step(self, optimizers: Sequence[RegisteredOptimizer], graph: str, steps: Iterable[str]) -> None:
        """Note what the step has left."""
        if not steps or not self.is_young:
            return
        self._steps += 1
        self.is_young = self._steps <= self._until
        if not self.is_young:
            for registered in optimizers:
                if isinstance(registered.scheduler, LRScheduler):
                    _LEFT_AT.pop(registered.scheduler, None)
        elif "scheduler" not in self._reported:
            left_schedulers(optimizers)
        if self._steps <= 2:  # then its loop has gone round once
            Mistakes._looking = [me for me in Mistakes._looking if me() not in (None, self)]
        if self._steps == 1:
            updated = [p for registered in optimizers if not registered.manual for p in registered.parameters]
            self._left = [left for registered in optimizers if (left := step_left(registered)) is not None]
            self._graph, self._stepped = graph, {id(p): _stepped(p) for p in updated}
            Mistakes._looking.append(weakref.ref(self))

    def look_at_clipping(self, parameters: Sequence[torch.Tensor], limit: float) -> None:
        """Warn of gradients that are clipped as the step has left them. A limit of infinity only asks for the norm."""
        known = [(self._stepped.get(id(parameter)), parameter) for parameter in parameters]
        if known and math.isfinite(limit) and all(a is not None and a.is_left(p) for a, p in known):
            self._tell(
                "clipping",
                f"gradients are clipped after {self._graph} has run: it has updated the parameters already, so that this "
                "has no effect; clip in build(), between loss.backward() and its end",
            )

    def look_at_early_clipping(self, graph: str) -> None:
        """Warn of gradients that are clipped in build() before there are any."""
        self._tell(
            "early clipping",
            f"build() of {graph} clips gradients where there are none yet, so that this has no effect; clip between "
            "loss.backward() and the end of build()",
        )

    def _knows(self, parameter: torch.Tensor) -> bool:
        known = self._known.get(id(parameter))
        return known is not None and known() is parameter

    def _trained(
        self, optimizers: Sequence[RegisteredOptimizer], modules: Modules, number: int, steps: set[str]
    ) -> list[nn.Module]:
        """The modules held by the graph that have parameters which the build updates."""
        if number not in self._roots:
            updated = {
                id(p) for registered in optimizers if registered.name in steps for p in registered.parameters
            }
            self._roots[number] = [
                weakref.ref(module)
                for module in modules().values()
                if any(id(parameter) in updated for parameter in module.parameters())
            ]
        return [module for found in self._roots[number] if (module := found()) is not None]

    def _look_at_modes(self, graph: str, roots: list[nn.Module]) -> None:
        if not roots:
            return
        trains = any(root.training or any(module.training for module in root.modules()) for root in roots)
        self._modes.add(trains)
        if len(self._modes) == 2:
            now, before = ("train", "eval") if trains else ("eval", "train")
            self._tell(
                "mode",
                f"{graph} is called with its model in {now}() mode, before that in {before}() mode: a step in eval() "
                "mode trains the model just as well; to validate, use a Graph without optimizer, or the model under "
                "torch.no_grad(); to train, call model.train() first",
            )

    def _tell(self, what: str, message: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            warn_at_user_line(message)


def left_schedulers(optimizers: Sequence[RegisteredOptimizer]) -> None:
    """Note where the schedulers stand that the graph steps."""
    for registered in optimizers:
        if (
            isinstance(registered.scheduler, LRScheduler)
            and (place := _place_of(registered.scheduler)) is not None
        ):
            _LEFT_AT[registered.scheduler] = _Left(place, _versions(registered))


def _versions(registered: RegisteredOptimizer) -> int:
    # kernels that update all at once count in the state alone
    return sum(map(version_of, (*registered.parameters, *state_tensors(registered.optimizer))))


def _place_of(scheduler: Any) -> int | None:
    return getattr(_counting(scheduler), "last_epoch", None)


def _counting(scheduler: Any) -> Any:
    """The scheduler that counts: a ChainedScheduler does so in those that it holds."""
    inner = schedulers_inside(scheduler)
    return _counting(inner[0]) if getattr(scheduler, "last_epoch", None) is None and inner else scheduler


def _stepped(parameter: torch.Tensor) -> _Stepped:
    gradient = parameter.grad
    known = (0, 0) if gradient is None else (id(gradient), version_of(gradient))
    return _Stepped(weakref.ref(parameter), *known)


def _look_at_all(parameters: Sequence[torch.Tensor], limit: float) -> None:
    for me in Mistakes._looking:
        if (mistakes := me()) is not None:
            mistakes.look_at_clipping(parameters, limit)


def _look_inside(parameters: Sequence[torch.Tensor]) -> None:
    found = getattr(_CAPTURING, "mistakes", None)
    mistakes = found() if found is not None else None
    if mistakes is not None and parameters and all(parameter.grad is None for parameter in parameters):
        mistakes.look_at_early_clipping(_CAPTURING.graph)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more
