"""Gradients that stay after a step, and those of the step before, without which a step of the graph begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.autograd import leaves_behind
from monograph.compat.fakes import is_fake
from monograph.compat.modes import outside_of_function_modes
from monograph.compat.tensors import changes_of
from monograph.errors import CaptureError, OptimizerError
from monograph.ir.graph_signature import Argument, Gradient, HeldGradient
from monograph.ir.port import Role, gradient_path
from monograph.settings import Settings
from monograph.state.find import Owned, RegisteredOptimizer
from monograph.user_code.files import is_inside, is_torch, is_user_file
from monograph.user_code.lines import Origin, user_place

_ADDS_UP = (
    "clear it in build() before backward(), as your loop does: model.zero_grad(); to let it add up as eager mode does: "
    "config.keep_gradients() before the first call"
)
_COMES_BEFORE = "config.keep_gradients() before the first call; if it is not to count, clear it in build() before: model.zero_grad()"
_ZEROS = (
    "zero_grad() takes gradients away, and no step comes to see zeros; to keep zeros as in eager mode: "
    "config.keep_gradients() before the first call, with add_optimizer(..., manual=True)"
)


class OldGradientError(OptimizerError):
    """A step uses gradients of the step before, and begins without them."""


@dataclass(frozen=True)
class GradientsSeen:
    """The paths of parameters to which steps have given gradients, and of those that one has zeroed and given none."""

    given: frozenset[str] = frozenset()
    zeroed: frozenset[str] = frozenset()

    @staticmethod
    def of_all(seen: Sequence[GradientsSeen]) -> GradientsSeen | None:
        """What all of some builds have seen; None if there are none."""
        if not seen:
            return None
        given, zeroed = [item.given for item in seen], [item.zeroed for item in seen]
        return GradientsSeen(frozenset().union(*given), frozenset().union(*zeroed))


class OldGradients:
    """Watches for what eager mode would do with the gradients of the step before.

    Parameters that optimizers of a graph update begin each step without gradients, and so build() need not clear them.
    Where it runs `as_written`, and for all other parameters, a gradient that nothing clears adds up in eager mode.
    """

    def __init__(self, owned: Owned, settings: Settings, before: GradientsSeen | None) -> None:
        self._owned, self._before = owned, before
        self._active = settings.accumulation_steps == 1
        self._keeps = settings.keep_gradients
        self._paused = False
        self._paths: dict[int, str] | None = None  # of the parameters that begin without gradients, by id
        self._cleared_first: set[int] = set()  # by the graph
        self._cleared: set[int] = set()  # by build()
        self._used: dict[int, tuple[torch.Tensor, str, Origin]] = {}  # old gradients, as far as one knows
        self._missed: dict[str, Origin] = {}  # what is there before the step, and build() has found none
        self._asked_for_zeros: set[int] = set()  # of no gradient, where eager mode may have an old one
        self._zeroed: dict[
            int, tuple[int, int]
        ] = {}  # the gradient that was filled with zeros, and its changes
        self._given: set[str] = set()
        self._without: dict[str, int] = {}  # what an optimizer had no gradient of, with its id
        self._place = Origin()  # of zero_grad()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, who reads gradients is not the user."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def was_read(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        frame: FrameType | None,
        real: torch.Tensor | None = None,
    ) -> bool:
        """Code that runs in `frame` has looked at the gradient of a parameter, which stands for a real one.

        True if it has found none, as in eager mode if there is none before the step.
        """
        if not self._active or self._paused or id(parameter) not in self._known():
            return False
        reader = _reader(frame)
        if reader is None:
            return False
        key = id(parameter)
        if reader.f_code.co_name == "zero_grad" and not is_user_file(reader.f_code.co_filename):
            if not reader.f_locals.get("set_to_none", True):
                self._place = user_place(reader)
                if gradient is None:
                    self._asked_for_zeros.add(key)
                else:
                    self._zeroed[key] = id(gradient), changes_of(gradient) + 1
            self._cleared.add(key)
        elif gradient is not None:
            self._use(parameter, "reads", user_place(reader))
        elif real is not None and key not in self._cleared and key not in self._cleared_first:
            if real.grad is not None:
                self._missed.setdefault(self._known()[key], user_place(reader))
            return real.grad is None
        return False

    def is_set(self, parameter: torch.Tensor) -> None:
        """Some code puts another gradient there, or none."""
        self._cleared.add(id(parameter))

    def stepping(self, registered: RegisteredOptimizer) -> None:
        """An optimizer is about to step."""
        if not self._active:
            return
        place, known = user_place(), self._known()
        with self.paused():
            for parameter in registered.parameters:
                key = id(parameter)
                if (path := known.get(key)) is None:
                    continue
                if parameter.grad is not None:
                    self._given.add(path)
                else:
                    self._without[path] = key
                if parameter.grad is not None or parameter.requires_grad:
                    self._use(parameter, "updates by", place)

    def _use(self, parameter: torch.Tensor, how: str, place: Origin) -> None:
        key = id(parameter)
        if key not in self._cleared and key not in self._cleared_first:
            self._used.setdefault(key, (parameter, how, place))

    def _known(self) -> dict[int, str]:
        if self._paths is None:
            automatic, manual = (
                {id(p) for item in self._owned.optimizers if item.manual is kind for p in item.parameters}
                for kind in (False, True)
            )
            self._cleared_first = automatic if self._owned.as_written else automatic | manual
            self._paths = {
                id(parameter): f"{root}.{name}"
                for root, module in self._owned.modules.items()
                for name, parameter in module.named_parameters()
                if not self._keeps or id(parameter) in automatic
            }
        return self._paths

    def seen(self) -> GradientsSeen:
        """What the step has done."""
        zeroed = [path for path, key in self._without.items() if key in self._asked_for_zeros]
        return GradientsSeen(frozenset(self._given), frozenset(zeroed))

    def check(self) -> None:
        """The step is over. Raises OldGradientError where eager mode would compute with the gradients of the step before.

        Of the first step that is `as_written` gradients can still be kept, and so zeros are enough.
        """
        if not self._active:
            return
        for path, place in self._missed.items():
            raise OldGradientError(
                f"build() reads the gradient of {path}, which is there before the step: a step of the graph begins without "
                "gradients",
                where=place,
                hint=_COMES_BEFORE,
            )
        with self.paused():
            for parameter, how, place in self._used.values():
                if self._stays(parameter):
                    raise OldGradientError(
                        f"build() {how} the gradient of {self._known()[id(parameter)]}, which nothing clears: in eager mode it "
                        "adds up from step to step, and a step of the graph begins without gradients",
                        where=place,
                        hint=_ADDS_UP,
                    )
        before, now = self._before or GradientsSeen(), self.seen()
        lost = now.zeroed & before.given | now.given & before.zeroed
        if self._before is None and self._owned.as_written and (self._zeroed or self._asked_for_zeros):
            lost = now.given
        if lost:
            raise OldGradientError(
                f"zero_grad(set_to_none=False), and a gradient of {min(lost)} in some steps only: in the others it is zero in eager "
                "mode, with which an optimizer steps, and there is none in a graph",
                where=self._place,
                hint=_ZEROS,
            )

    def _stays(self, parameter: torch.Tensor) -> bool:
        """True if a gradient is left that the next step adds to in eager mode."""
        gradient = parameter.grad
        return gradient is None or self._zeroed.get(id(parameter)) != (id(gradient), changes_of(gradient))


def _reader(frame: FrameType | None) -> FrameType | None:
    """The frame that reads a gradient for the user's code; None if we do."""
    asking: FrameType | None = None
    if frame is None or (is_inside(file := frame.f_code.co_filename) and not is_torch(file)):
        return None
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return asking or frame
        if frame.f_code.co_name == "zero_grad":
            asking = asking or frame
        frame = frame.f_back
    return None


@contextmanager
def unseen_refused(inputs: Inputs, roots: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raise CaptureError after a backward() that gives a gradient to a parameter itself, not to what stands for it.

    No gradient is read but of parameters that it comes to: torch crashes if another thread sets one meanwhile.
    """
    leaves = set(map(id, leaves_behind(roots)))
    yield
    with outside_of_function_modes():  # which show the gradients of fakes
        unseen = [
            item
            for item in inputs.items
            if item.role is Role.PARAM and id(item.owner) in leaves and is_fake(item.owner.grad)
        ]
        for item in unseen:
            item.owner.grad = None
    if unseen:
        raise CaptureError(
            f"build() computes with {unseen[0].path} where a capture cannot see it, so that it would not be trained",
            hint="read it from its module in build(): self.model.weight",
        )


def gradients_left(inputs: Inputs, without: list[str], *, keep_gradients: bool) -> Iterator[StateOutput]:
    """Gradients of parameters if they are kept, of arguments always, as eager leaves them.

    `without` gets the paths of the parameters that are trained and get none.
    """
    for item in inputs.items:
        tensor = item.shown
        asked = isinstance(tensor, torch.Tensor) and (tensor.is_leaf or tensor.retains_grad)
        gradient = tensor.grad if asked else None
        if item.role is Role.PARAM:
            if gradient is None and item.owner.requires_grad:
                without.append(item.path)
            held = inputs.by_fake.get(id(gradient))
            source = None if held is None else held.source
            if isinstance(source, HeldGradient) and source.parameter is item.owner:
                continue  # it was there before: what was added to it goes into it
            if keep_gradients and (item.owner.requires_grad or item.owner.grad is not None):
                path = f"{gradient_path(item.path)}/part" if item.sums_whole else gradient_path(item.path)
                yield StateOutput(gradient, Gradient(item.owner), path)
        elif gradient is not None and isinstance(item.source, Argument):
            target = Gradient(None, item.source.index)
            yield StateOutput(gradient, target, gradient_path(item.path))
