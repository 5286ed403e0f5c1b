"""What a Graph does around build(), alike in a trace and in eager mode: autocast, scaled losses, clipping by the keys
of param groups.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from monograph.capture.effects.gradients import GradientsSeen, OldGradients
from monograph.capture.optimizers.autocast import Casting
from monograph.capture.tensors.functions import infinities_of_all
from monograph.compat.amp import forget_unscaled
from monograph.compat.autograd import watching_backward
from monograph.compat.modes import current_tracer, is_tracing
from monograph.compat.patching import replaced
from monograph.compat.tensors import changes_of
from monograph.compat.traces.nodes import traced_node
from monograph.errors import CaptureError, OptimizerError
from monograph.settings import Settings
from monograph.state.find import Owned, RegisteredOptimizer
from monograph.state.group_keys import clip, has_limits, with_lr_scale
from monograph.user_code.files import is_user_file
from monograph.user_code.lines import Origin, step_place, warn_at_user_line

_DIVIDE, _MULTIPLY = torch.ops.aten.div.Tensor, torch.ops.aten.mul.Tensor
_READY, _UNSCALED, _STEPPED = "ready", "unscaled", "stepped"
_OWN_METHODS = (
    "scale",
    "step",
    "update",
    "load_state_dict",
    "set_growth_factor",
    "set_backoff_factor",
    "set_growth_interval",
)


def _unnoticed(_phase: str) -> AbstractContextManager[None]:
    return nullcontext()


def _unchecked(_roots: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    return nullcontext()


class StepRules:
    """The rules of one step; made anew for each. `doing(phase)` surrounds work that is not in the user's code.

    `checked(roots)` surrounds each backward(), also one that another runs.
    """

    def __init__(
        self,
        owned: Owned,
        settings: Settings,
        before: GradientsSeen | None = None,
        doing: Callable[[str], AbstractContextManager[None]] = _unnoticed,
        around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
        checked: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = _unchecked,
    ) -> None:
        self.old_gradients = OldGradients(owned, settings, before)
        scaler = owned.scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._owned, self._settings, self._doing = owned, settings, doing
        self._around_backward, self._checked = around_backward, checked
        self._casting = Casting(owned, settings)
        self._stages = {registered.name: _READY for registered in owned.optimizers}
        self._owners: dict[int, RegisteredOptimizer] | None = None  # by id of the parameter
        self._in_backward = self._own_business = False
        self.complete = True  # the gradients of every micro-batch are there
        self.backward_at: Origin | None = None  # the line of the first backward()
        self.reached: set[str] = set()  # the optimizers to whose parameters a backward() has given gradients
        self.stepped: Counter[str] = Counter()  # how often each optimizer has stepped

    @contextmanager
    def hold(self) -> Iterator[None]:
        """To be entered around the whole step: what build() calls follows the rules."""
        with ExitStack() as stack:
            stack.enter_context(watching_backward(self._backward))
            if self._scaler is not None:
                forget_unscaled(self._scaler)  # what a failed step has left
                stack.callback(forget_unscaled, self._scaler)
                for name in _OWN_METHODS:
                    if hasattr(self._scaler, name):
                        stack.enter_context(replaced(self._scaler, name, _refuse_scaling(name)))
                stack.enter_context(replaced(self._scaler, "unscale_", self._unscale_for_user))
            yield

    def autocast(self) -> AbstractContextManager[None]:
        """To be entered around build()."""
        return self._casting.on()

    # --- backward --------------------------------------------------------------------------------------------------

    def _backward(
        self, run: Callable[..., Any], tensors: Any, grad_tensors: Any, *args: Any, **options: Any
    ) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if self._in_backward:  # of a hook
            with self._checked(given):
                return run(tensors, grad_tensors, *args, **options)
        self.backward_at = self.backward_at or step_place()
        self._casting.end()
        unscaled = self._gradients(_UNSCALED)
        self._in_backward = True
        try:
            with self._casting.off():
                roots = tuple(map(self._root, given))
                with self._around_backward(), self._checked(roots):
                    returned = run(roots, grad_tensors, *args, **options)
        finally:
            self._in_backward = False
        with self.own_business():
            self.reached |= {
                item.name
                for item in self._owned.optimizers
                if any(p.grad is not None for p in item.parameters)
            }
        if (mixed := _first_changed(unscaled, self._gradients(_UNSCALED))) is not None:
            raise CaptureError(
                f"backward() adds to gradients of {mixed} that are unscaled already, because they were read or changed",
                hint="call every backward() first, then clip or change gradients, then step",
            )
        return returned

    def _gradients(self, stage: str) -> dict[str, list[tuple[Any, int]]]:
        """The gradients of the optimizers at a stage, with how often each was changed in place."""
        with self.own_business():
            return {
                registered.name: [
                    (p.grad, -1 if p.grad is None else changes_of(p.grad)) for p in registered.parameters
                ]
                for registered in self._owned.optimizers
                if self._scaler is not None and self.complete and self._stages[registered.name] == stage
            }

    def _root(self, tensor: torch.Tensor) -> torch.Tensor:
        """What backward starts from: the loss of one micro-batch divided by their number, and scaled."""
        count = self._settings.accumulation_steps
        with self._doing("scale"):
            if count > 1:
                if _is_divided(tensor, count):
                    warn_at_user_line(
                        f"the loss is divided by {count} before backward(), and the graph divides it by its {count} micro-batches, too: "
                        f"the gradients are {count} times smaller than you expect; leave out `/ {count}`"
                    )
                tensor = tensor / count
            if self._scaler is not None:
                scaled: torch.Tensor = type(self._scaler).scale(self._scaler, tensor)
                return scaled
        return tensor

    # --- gradients that are read -------------------------------------------------------------------------------------

    @contextmanager
    def own_business(self) -> Iterator[None]:
        """Inside, reading a gradient does not unscale it."""
        before, self._own_business = self._own_business, True
        try:
            yield
        finally:
            self._own_business = before

    def gradient_was_read(self, parameter: torch.Tensor) -> None:
        """The user's code looks at a gradient: it must find it unscaled."""
        owner = self._owner(parameter)
        if owner is not None and not _in_zero_grad(sys._getframe(1)):
            self._unscale(owner)

    def gradient_is_set(self, parameter: torch.Tensor) -> None:
        """The user's code is about to put a gradient there: nothing unscales that one any more."""
        owner = self._owner(parameter)
        if owner is None or not self.complete or self._stages[owner.name] != _READY:
            return
        with self.own_business():
            found = any(p.grad is not None for p in owner.parameters)
        if not found:
            raise CaptureError(
                f"build() sets gradients of {owner.name} before any backward() has made one: "
                "the gradient scaler would take them for scaled ones",
                hint="call loss.backward() first, or train without a scaler: graph.set_grad_scaler(None)",
            )
        self._unscale(owner)

    def _owner(self, parameter: torch.Tensor) -> RegisteredOptimizer | None:
        """The optimizer of a parameter whose gradient the user's own code touches; None without a scaler."""
        if self._scaler is None or self._in_backward or self._own_business:
            return None
        if self._owners is None:
            optimizers = self._owned.optimizers
            self._owners = {id(p): registered for registered in optimizers for p in registered.parameters}
        return self._owners.get(id(parameter))

    def _unscale_for_user(self, optimizer: Optimizer) -> None:
        registered = next((h for h in self._owned.optimizers if optimizer in (h.optimizer, h.stepped)), None)
        if registered is None:
            raise CaptureError(
                f"unscale_() gets an optimizer that the graph does not hold ({type(optimizer).__name__})",
                hint="pass the one that was added by add_optimizer()",
            )
        self._unscale(registered)

    def _unscale(self, registered: RegisteredOptimizer) -> None:
        if self._scaler is not None and self.complete and self._stages[registered.name] == _READY:
            self._stages[registered.name] = _UNSCALED
            with self.own_business(), self._doing("scale"), self._casting.off(), infinities_of_all():
                type(self._scaler).unscale_(self._scaler, registered.optimizer)

    # --- the update ----------------------------------------------------------------------------------------------------

    def step(self, registered: RegisteredOptimizer, run: Callable[[], Any]) -> Any:
        """A step of an optimizer; `run` is the step without rules."""
        if not self._own_business:
            with self.own_business():
                self.old_gradients.stepping(registered)
        with self.old_gradients.paused():
            return self._step(registered, run)

    def _step(self, registered: RegisteredOptimizer, run: Callable[[], Any]) -> Any:
        if self._own_business:  # the scaler calls it
            return with_lr_scale(registered.optimizer, run)
        if not self.complete:
            return None
        self.stepped[registered.name] += 1
        self._casting.end()
        with self._casting.off():
            if has_limits(registered.optimizer):
                self._unscale(registered)
                clip(registered.optimizer)
            if self._scaler is None:
                return with_lr_scale(registered.optimizer, run)
            with self.own_business():
                self._check_step(registered)
                returned = type(self._scaler).step(self._scaler, registered.optimizer)
        self._stages[registered.name] = _STEPPED
        return returned

    def _check_step(self, registered: RegisteredOptimizer) -> None:
        if self._stages[registered.name] == _STEPPED:
            raise OptimizerError(
                f"build() steps {registered.name} twice: a gradient scaler lets each optimizer step once in a step",
                hint="make each optimizer step a call of the graph, or train without a scaler",
            )
        if self._stages[registered.name] == _READY and all(p.grad is None for p in registered.parameters):
            raise OptimizerError(
                f"build() steps {registered.name} when none of its parameters has a gradient",
                hint="call loss.backward() before optimizer.step()",
            )

    def end(self) -> None:
        """To be called when every optimizer has stepped: the scale moves."""
        self._check_none_stays_unscaled()
        if self._scaler is not None and any(stage != _READY for stage in self._stages.values()):
            with self._doing("scale"), self._casting.off():
                type(self._scaler).update(self._scaler)

    def check_old_gradients(self) -> None:
        """Raise OldGradientError where eager mode would compute with the gradients of the step before."""
        with self.own_business():
            self.old_gradients.check()

    def _check_none_stays_unscaled(self) -> None:
        if self._settings.keep_gradients:
            for name, gradients in self._gradients(_UNSCALED).items():
                if any(gradient is not None for gradient, _ in gradients):
                    raise CaptureError(
                        f"build() reads or changes gradients of {name} in a call that does not step it: unscaled "
                        "ones would stay, and the next backward() would add scaled ones to them",
                        hint="look at gradients in those calls only that step the optimizer",
                    )


def _first_changed(
    before: dict[str, list[tuple[Any, int]]], after: dict[str, list[tuple[Any, int]]]
) -> str | None:
    """The first optimizer with another gradient than before, or with one that was changed in place."""
    for name, gradients in before.items():
        for (old, version), (new, new_version) in zip(gradients, after[name], strict=True):
            if old is not new or version != new_version:
                return name
    return None


def _refuse_scaling(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"build() calls {name}() of the graph's scaler: the graph does that itself",
            hint="write loss.backward(), and with a manual optimizer optimizer.step(); "
            "unscale_() may be called, and reading a gradient does it as well",
        )

    return refuse


def _in_zero_grad(frame: FrameType | None) -> bool:
    """True if torch's `zero_grad` is what reads: it throws the gradients away."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_name == "zero_grad":
            return True
        frame = frame.f_back
    return False


def _is_divided(tensor: torch.Tensor, count: int) -> bool:
    """True where the last thing that a trace has done with a loss is to divide it by a number."""
    node = traced_node(tensor, current_tracer()) if is_tracing() else None
    if node is None or node.target not in (_DIVIDE, _MULTIPLY):
        return False
    by = node.args[1]
    return isinstance(by, int | float) and by == (count if node.target is _DIVIDE else 1 / count)
