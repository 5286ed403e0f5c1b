"""What a Graph does around build(), alike in a trace and in eager mode: autocast, scaled losses, clipping by the keys
of param groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from monograph._torch import clear_autocast_cache, replaced, watching_backward
from monograph.capture.state import HeldOptimizer, Holdings
from monograph.config import Settings
from monograph.errors import CaptureError, is_user_file

CLIP_NORM, CLIP_TYPE, LR_SCALE = "clip_grad_max_norm", "clip_grad_norm_type", "lr_scale"
_READY, _UNSCALED, _STEPPED = "ready", "unscaled", "stepped"


def _unnoticed(_phase: str) -> AbstractContextManager[None]:
    return nullcontext()


class StepRules:
    """The rules of one step; made anew for each. `doing(phase)` surrounds work that is not in the user's code."""

    def __init__(
        self,
        holdings: Holdings,
        settings: Settings,
        *,
        doing: Callable[[str], AbstractContextManager[None]] = _unnoticed,
        around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        scaler = holdings.scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._holdings, self._settings, self._doing = holdings, settings, doing
        self._around_backward = around_backward
        self._stages = {held.name: _READY for held in holdings.optimizers}
        self._owners: dict[int, HeldOptimizer] | None = None  # by id of the parameter
        self._in_backward = self._own_business = False
        self.complete = True  # the gradients of every micro-batch are there

    @contextmanager
    def hold(self) -> Iterator[None]:
        """To be entered around the whole step: what build() calls follows the rules."""
        with ExitStack() as stack:
            stack.enter_context(watching_backward(self._backward))
            if self._scaler is not None:
                for name in ("scale", "step", "update"):
                    stack.enter_context(replaced(self._scaler, name, _refuse_scaling(name)))
                stack.enter_context(replaced(self._scaler, "unscale_", self._unscale))
            yield

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """To be entered around build()."""
        with ExitStack() as stack:
            for device in self._cast_devices():
                stack.enter_context(torch.autocast(device, dtype=self._settings.amp))
            yield

    @contextmanager
    def _no_autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device in self._cast_devices():
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _cast_devices(self) -> list[str]:
        if self._settings.amp is None:
            return []
        modules = self._holdings.modules.values()
        return sorted({p.device.type for module in modules for p in module.parameters()}) or ["cpu"]

    # --- backward --------------------------------------------------------------------------------------------------

    def _backward(
        self, run: Callable[..., Any], tensors: Any, grad_tensors: Any, *args: Any, **options: Any
    ) -> Any:
        if self._in_backward:  # of a hook
            return run(tensors, grad_tensors, *args, **options)
        unscaled = [name for name, stage in self._stages.items() if stage == _UNSCALED]
        if unscaled:
            raise CaptureError(
                f"backward() is called after gradients of {unscaled[0]} were read: they are unscaled already",
                hint="call every backward() first, then clip or change gradients, then step",
            )
        if self._settings.amp is not None:
            clear_autocast_cache()  # as at the end of an autocast block, where eager code calls backward
        self._in_backward = True
        try:
            with self._no_autocast():
                roots = tuple(map(self._root, [tensors] if isinstance(tensors, torch.Tensor) else tensors))
                with self._around_backward():
                    return run(roots, grad_tensors, *args, **options)
        finally:
            self._in_backward = False

    def _root(self, tensor: torch.Tensor) -> torch.Tensor:
        """What backward starts from: the loss of one micro-batch divided by their number, and scaled."""
        count = self._settings.accumulation_steps
        with self._doing("scale"):
            if count > 1:
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
        if self._scaler is None or self._in_backward or self._own_business or _in_zero_grad(sys._getframe(1)):
            return
        if self._owners is None:
            self._owners = {
                id(p): held
                for held in self._holdings.optimizers
                for group in held.optimizer.param_groups
                for p in group["params"]
            }
        if (owner := self._owners.get(id(parameter))) is not None:
            self._unscale(owner.optimizer)

    def _unscale(self, optimizer: Optimizer) -> None:
        name = next((h.name for h in self._holdings.optimizers if h.optimizer is optimizer), "")
        if self._scaler is not None and self.complete and self._stages.get(name) == _READY:
            self._stages[name] = _UNSCALED
            with self.own_business(), self._doing("scale"), self._no_autocast():
                type(self._scaler).unscale_(self._scaler, optimizer)

    # --- the update ----------------------------------------------------------------------------------------------------

    def step(self, held: HeldOptimizer, run: Callable[[], Any]) -> Any:
        """A step of an optimizer; `run` is the step without rules."""
        if self._own_business:  # the scaler calls it
            return _with_lr_scale(held.optimizer, run)
        if not self.complete:
            return None
        with self._no_autocast():
            if any(group.get(CLIP_NORM) is not None for group in held.optimizer.param_groups):
                self._unscale(held.optimizer)
                _clip(held.optimizer)
            if self._scaler is None:
                return _with_lr_scale(held.optimizer, run)
            with self.own_business():
                returned = type(self._scaler).step(self._scaler, held.optimizer)
        self._stages[held.name] = _STEPPED
        return returned

    def end(self) -> None:
        """To be called when every optimizer has stepped: the scale moves."""
        if self._scaler is not None and any(stage != _READY for stage in self._stages.values()):
            with self._doing("scale"), self._no_autocast():
                type(self._scaler).update(self._scaler)


def _clip(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if (limit := group.get(CLIP_NORM)) is not None:
            torch.nn.utils.clip_grad_norm_(group["params"], limit, norm_type=group.get(CLIP_TYPE, 2.0))


def _with_lr_scale(optimizer: Optimizer, run: Callable[[], Any]) -> Any:
    scaled = [(group, group["lr"]) for group in optimizer.param_groups if group.get(LR_SCALE) is not None]
    try:
        for group, rate in scaled:
            group["lr"] = rate * group[LR_SCALE]
        return run()
    finally:
        for group, rate in scaled:
            group["lr"] = rate


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
