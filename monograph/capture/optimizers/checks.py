"""What a step must have done when its trace ends: optimizers stepped, gradients used, parameters as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from monograph.capture.optimizers.scalers import foreign_scalers_refused
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.patching import in_this_thread, replace
from monograph.errors import CaptureError, MonographError, OptimizerError, first_line
from monograph.ir.port import Role
from monograph.settings import Settings
from monograph.state.find import Owned, RegisteredOptimizer
from monograph.user_code.lines import Origin


def check_gradients(registered: RegisteredOptimizer, *, were_there: bool) -> None:
    """Raise OptimizerError if an automatic optimizer has nothing to step with; `were_there` if a backward() had given it that."""
    if any(parameter.grad is not None for parameter in registered.parameters):
        return
    why, hint = (
        (
            "build() takes away those that backward() has made, by zero_grad() or by setting p.grad to None",
            "leave zero_grad() out of build(): each step of the graph begins without gradients; or call it before loss.backward()",
        )
        if were_there
        else (
            "build() did not call backward() on a loss that depends on its parameters",
            "call loss.backward() in build(), or do not add the optimizer",
        )
    )
    raise OptimizerError(
        f"{registered.name} ({type(registered.optimizer).__name__}) has no gradient to step with: {why}",
        hint=hint,
    )


def check_not_stepped(registered: RegisteredOptimizer, places: Mapping[str, Origin]) -> None:
    """Raise OptimizerError if build() has stepped an optimizer that the graph steps after it; `places` are the lines of steps so far."""
    if registered.name in places:
        raise OptimizerError(
            f"build() calls step() of {registered.name} ({type(registered.optimizer).__name__}), which the graph steps after "
            "build(): each call would update twice",
            where=places[registered.name],
            hint="leave step() out of build(), or add the optimizer with manual=True",
        )


@contextmanager
def steps_refused(owned: Owned) -> Iterator[None]:
    """Inside, steps in this thread that would come at a wrong time raise: of a scaler or a scheduler that are not build()'s to step."""
    stepped_later = {id(item.optimizer): item for item in owned.optimizers if not item.manual}
    classes = [cls for cls in _with_subclasses(LRScheduler) if "step" in vars(cls)] if stepped_later else []

    def unless_later(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if (found := stepped_later.get(id(getattr(scheduler, "optimizer", None)))) is not None:
                raise OptimizerError(
                    f"build() calls step() of a {type(scheduler).__name__} of {found.name}, which the graph steps after build(): "
                    "the update would already have the next learning rate",
                    hint="to step it after each update: add_optimizer(optimizer, lr_scheduler=scheduler); or call "
                    "scheduler.step() after the graph, as at the end of an epoch",
                )
            return original(scheduler, *args, **kwargs)

        return in_this_thread(run, original)

    with foreign_scalers_refused(owned.scaler), ExitStack() as stack:
        for cls in classes:
            replace(stack, cls, "step", unless_later(vars(cls)["step"]))
        yield


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    below: type
    for below in cls.__subclasses__():
        yield from _with_subclasses(below)


def check_groups(registered: RegisteredOptimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptimizerError if build() has added or removed param groups; `before` are those at the beginning."""
    number = len(registered.optimizer.param_groups)
    if number != len(before):
        raise OptimizerError(
            f"build() changes the number of param groups of {registered.name} ({type(registered.optimizer).__name__}) "
            f"from {len(before)} to {number}",
            hint="add or remove param groups between two calls: the graph makes another build then",
        )


@contextmanager
def reported_options(registered: RegisteredOptimizer, before: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """A step that misses state which an option asks for that build() has set: an OptimizerError."""
    try:
        yield
    except KeyError as error:
        check_groups(registered, before)
        groups = zip(registered.optimizer.param_groups, before, strict=True)
        changed = {
            key
            for now, known in groups
            for key in now
            if isinstance(now[key], bool) and now[key] is not known.get(key)
        }
        if not changed:
            raise
        raise OptimizerError(
            f"build() sets {', '.join(sorted(changed))} of {registered.name} ({type(registered.optimizer).__name__}), "
            f"and its state has no {error} for that",
            hint="set it before the first call",
        ) from error


@contextmanager
def reported_parts(registered: RegisteredOptimizer) -> Iterator[None]:
    """A step that DTensor does not run, on parameters that are DTensors: an OptimizerError."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, MonographError) or not any(map(is_sharded, registered.parameters)):
            raise
        raise OptimizerError(
            f"the step of {registered.name} ({type(registered.optimizer).__name__}) does not run on parameters that are "
            f"DTensors: {first_line(error)}",
            hint="nor does it in eager mode: use another optimizer, or a plain model and config.enable_zero(), which keeps "
            "parameters of such an optimizer whole",
        ) from error


def check_steps(
    owned: Owned, settings: Settings, steps: Mapping[str, int], inputs: Inputs, backward_at: Origin | None
) -> None:
    """Raise OptimizerError for a manual optimizer that was not stepped, and for gradients that nobody uses: that one at `backward_at`."""
    for registered in owned.optimizers:
        if registered.manual and not steps.get(registered.name) and not settings.keep_gradients:
            raise OptimizerError(
                f"{registered.name} ({type(registered.optimizer).__name__}) was added with manual=True, "
                "but build() never calls its step() in this call",
                hint="call optimizer.step() in build(), or add it without manual=True; to step only after "
                "several calls, let gradients stay: config.keep_gradients(True); to train other parts in other calls, "
                "write a graph for each kind of call: graphs over one model may share its optimizers",
            )
        if registered.wrapper is not None and not registered.manual and not steps.get(registered.name):
            raise OptimizerError(
                f"step() of the {type(registered.wrapper).__name__} has not stepped the {type(registered.optimizer).__name__} "
                f"inside of {registered.name}",
                hint="add the optimizer inside, which the graph steps at each call; to accumulate gradients: "
                "config.set_gradient_accumulation_steps(n)",
            )
    parameters = [item.shown for item in inputs.items if item.role is Role.PARAM]
    unused = not owned.optimizers and not settings.keep_gradients
    if unused and any(parameter.grad is not None for parameter in parameters):
        raise OptimizerError(
            "build() calls backward(), but the graph has no optimizer that would use the gradients",
            where=backward_at,
            hint="call add_optimizer() in __init__, or config.keep_gradients(True) if you use p.grad yourself, in build() or "
            "after the call",
        )


def check_trainable(inputs: Inputs, places: Mapping[int, Origin]) -> None:
    """Raise CaptureError if build() has frozen or thawed a parameter for good: the next step begins there.

    `places` says where it did, by id of what it found.
    """
    for item in inputs.items:
        if item.role is Role.PARAM and item.shown.requires_grad != item.owner.requires_grad:
            raise CaptureError(
                f"build() leaves requires_grad of {item.path} at {item.shown.requires_grad}: "
                "the next step would differ",
                where=places.get(id(item.shown)),
                hint="set it before the step, or set it back at the end of build()",
            )
