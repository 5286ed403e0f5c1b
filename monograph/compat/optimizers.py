"""Optimizers, learning-rate schedulers and gradient clipping: notes and wrappers of `torch.optim` in its instances.

Each function says what happens without them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch

from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.modes import is_tracing, outside_of_modes
from monograph.compat.patching import replace_here, replaced
from monograph.compat.symbolic_numbers import is_symbolic

_OPTIMIZER = "torch.optim.optimizer"  # a name that torch.optim does not keep
# What: the module of an optimizer that takes `max` and `min` of numbers. Why: to see them there.
ADAFACTOR = "torch.optim._adafactor"
# what optimizers, schedulers and scalers note for themselves in an optimizer
NOTES_IN_OPTIMIZERS = frozenset(
    {
        "_opt_called",
        "_step_count",
        "_need_device_dtype_check_for_fused",
        "_step_supports_amp_scaling",
        "grad_scale",
        "found_inf",
    }
)


@cache
def attributes_of_optimizers() -> frozenset[str]:
    """What torch keeps in every optimizer. Not made at import: an optimizer brings Dynamo along."""

    class Plain(torch.optim.Optimizer):
        # torch puts a wrapper around the `step` of the class of each optimizer that is made: around this one, not its own
        def step(self, closure: Any = None) -> Any:
            raise NotImplementedError

    with outside_of_modes():  # asked for in the middle of a trace
        found = frozenset(vars(Plain([torch.zeros(1)], {})))
    return found - {"defaults"} | NOTES_IN_OPTIMIZERS | {"step"}


# attributes of a scheduler, and entries of its state dict: how often it has stepped, its present rates, and those that
# it holds
STEP_COUNT, LAST_RATES, SCHEDULERS_INSIDE = "_step_count", "_last_lr", "_schedulers"
# where its step() notes that it runs
WITHIN_STEP = "_get_lr_called_within_step"


def schedulers_inside(scheduler: Any) -> Sequence[Any]:
    """The schedulers that one of several holds; none in any other."""
    found: Sequence[Any] = getattr(scheduler, SCHEDULERS_INSIDE, ())
    return found


def make_scale_function(scheduler: Any) -> None:
    """Let a CyclicLR that was made without its constructor have the function by which it scales."""
    scheduler._init_scale_fn()


def mark_wrapped(step: Any) -> None:
    """Let schedulers take a function for the `step` of an optimizer that they have wrapped already."""
    step._wrapped_by_lr_sched = True


def scales_by_function(scheduler: Any) -> bool:
    """True for a CyclicLR whose scale is a function of the user's. Degraded path: False."""
    return getattr(scheduler, "_scale_fn_custom", None) is not None


@contextmanager
def lists_for_fakes() -> Iterator[None]:
    """Inside, optimizers take ops on lists for fakes as they do for torch's own tensors.

    What: the types for which an optimizer on an accelerator takes ops on lists where nothing is said. Why: their bits differ
    there from those of single ops. Degraded path: single ops.
    """
    types: list[type] = getattr(importlib.import_module(_OPTIMIZER), "_foreach_supported_types", [])
    types.append(torch._subclasses.fake_tensor.FakeTensor)
    try:
        yield
    finally:
        types.remove(torch._subclasses.fake_tensor.FakeTensor)


def takes_lists(parameters: Sequence[torch.Tensor]) -> bool:
    """True if an optimizer of these takes ops on lists where nothing is said. Degraded path: on all but CPUs."""
    choose = getattr(importlib.import_module(_OPTIMIZER), "_default_to_fused_or_foreach", None)
    if choose is None:
        return any(item.device.type != "cpu" for item in parameters)
    return bool(choose(list(parameters), differentiable=False)[1])


OPTIMIZER_HOOK_FIELDS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def marking_as_stepped(optimizer: Any) -> Callable[[], None]:
    """Lets learning-rate schedulers know that the optimizer has stepped, which they check once."""
    return partial(setattr, optimizer, "_opt_called", True)


def watch_clipping(
    wanted: Callable[[], bool],
    look: Callable[[list[torch.Tensor], float], None],
    look_inside: Callable[[list[torch.Tensor]], None],
) -> None:
    """Let `look` see the parameters and the limit of each clipping of gradients outside of traces, where it is `wanted`.

    Inside of traces `look_inside` sees the parameters.

    What: the function in `clip_grad_norm_`, which is found anew at each call, whoever has imported that. It stays
    watched: steps that clip would find another function otherwise. Why: to warn of clipping that comes too late, or too early.
    Degraded path: nothing is seen.
    """
    module = importlib.import_module("torch.nn.utils.clip_grad")
    places = [
        (module, "_clip_grads_with_norm_"),
        (module, "clip_grad_value_"),
        (torch.nn.utils, "clip_grad_value_"),
    ]
    found = [(holder, name, vars(holder)[name]) for holder, name in places if name in vars(holder)]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tracing = is_tracing()
            if not tracing and not wanted():
                return function(*args, **kwargs)
            given = inspect.signature(function).bind(*args, **kwargs)
            found = given.arguments.get("parameters", ())
            given.arguments["parameters"] = [found] if isinstance(found, torch.Tensor) else list(found)
            if tracing:
                look_inside(given.arguments["parameters"])
            else:
                limit = given.arguments.get("max_norm", given.arguments.get("clip_value", 0.0))
                look(given.arguments["parameters"], float(limit))
            return function(*given.args, **given.kwargs)

        return run

    ours = {function: watched(function) for _, _, function in found}
    for holder, name, function in found:
        setattr(holder, name, ours[function])


@contextmanager
def clipping_by_one_norm() -> Iterator[None]:
    """Inside, gradients in parts and whole ones may be clipped together, by the norm of all.

    What: the function in `clip_grad_norm_` that scales them. Why: a DTensor scales no plain tensor. Degraded path: an error.
    """
    module = importlib.import_module("torch.nn.utils.clip_grad")
    its_own = getattr(module, "_clip_grads_with_norm_", None)

    def scaled(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        assert its_own is not None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        in_parts = [item for item in given if is_sharded(item.grad)]
        its_own(in_parts, max_norm, total_norm, *args, **kwargs)
        if whole := [item for item in given if not is_sharded(item.grad)]:
            norm = total_norm.full_tensor() if is_sharded(total_norm) else total_norm
            its_own(whole, max_norm, norm, *args, **kwargs)

    with ExitStack() as stack:
        if its_own is not None:
            replace_here(stack, module, "_clip_grads_with_norm_", scaled)
        yield


def without_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's `step` without the wrapper by which torch runs hooks; it wraps that of each class when it is used."""
    own_file = torch.optim.Optimizer.__init__.__code__.co_filename
    while getattr(step, "hooked", False) and step.__code__.co_filename == own_file:
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def is_torchs_own(optimizer: Any) -> bool:
    """True for an optimizer of torch with no method replaced, in it or in its class; `step` of the instance may be.

    What: the wrappers around methods of a class. Why: it treats its parameters alike. Degraded path: none needed.
    """
    kind, own = type(optimizer), torch.optim.__name__ + "."
    replaced = {name for name, value in vars(optimizer).items() if callable(getattr(kind, name, None))}
    methods = [method for method in vars(kind).values() if callable(method)]
    written = all(_is_of(("torch.",), method) for method in methods)  # Dynamo wraps some
    return kind.__module__.startswith(own) and replaced <= {"step"} and written


def steps_alone(step: Any, optimizer: Any) -> bool:
    """True if nobody else's code runs when `step` of torch's own optimizer is called.

    What: the tables of hooks, and the wrappers of schedulers and of each class. Degraded path: False.
    """
    module = importlib.import_module("torch.optim.optimizer")
    tables = [getattr(optimizer, name, True) for name in OPTIMIZER_HOOK_FIELDS]
    tables += [getattr(module, f"_global_optimizer_{when}_hooks", True) for when in ("pre", "post")]
    is_whole = inspect.unwrap(getattr(step, "__func__", step)) is inspect.unwrap(type(optimizer).step)
    return is_whole and not any(tables) and _is_of((torch.optim.__name__ + ".", "torch.utils."), step)


def _is_of(modules: tuple[str, ...], method: Any) -> bool:
    """True if a method, and all that is wrapped around it, was written in these modules."""
    while method is not None:
        function = getattr(method, "__func__", method)
        if not str(getattr(function, "__globals__", {}).get("__name__", "")).startswith(modules):
            return False
        method = getattr(function, "__wrapped__", None)
    return True


def without_scheduler(step: Any, kind: type) -> Any:
    """The attribute `step` of an optimizer without the wrapper of a scheduler; None if it wraps that of the class.

    What: the mark of the wrapper. Why: schedulers may come and go after a capture. Degraded path: one more build.
    """
    if not getattr(step, "_wrapped_by_lr_sched", False):
        return step
    inner = step.__wrapped__
    return None if inner is getattr(kind, "step", None) else inner


def step_is_noted(optimizer: Any) -> bool:
    """Whether `step()` was called since `forget_step`. Degraded path: yes, where torch does not note it."""
    return not hasattr(optimizer.step, "_wrapped_by_lr_sched") or getattr(optimizer, "_opt_called", False)


def forget_step(optimizer: Any) -> None:
    """Let `step_is_noted` be False until the next `step()`."""
    optimizer._opt_called = False


@contextmanager
def symbolic_limits() -> Iterator[None]:
    """What: `clip_grad_norm_` without its `float(max_norm)` where that is symbolic. Why: the limit stays an input.
    Degraded path: it is a constant, and each other limit a build.
    """
    clipping = importlib.import_module("torch.nn.utils.clip_grad")
    with replaced(clipping, "float", lambda limit: limit if is_symbolic(limit) else float(limit)):
        yield
