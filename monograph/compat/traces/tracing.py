"""make_fx: `torch.fx.experimental.proxy_tensor`, and what a trace replaces in torch.

Without make_fx nothing is captured; each function says what happens without the rest.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from monograph.compat.fake_values import KnownValue, results_by_value
from monograph.compat.fakes import LOGGER_OF_FAKES
from monograph.compat.modes import current_tracer
from monograph.compat.patching import replace_here, replaced
from monograph.compat.symbolic_numbers import exact_arithmetic
from monograph.compat.traces.branches import branches_compiled
from monograph.compat.traces.kernels import results_by_form
from monograph.compat.traces.nodes import add_inputs, record_directly


def _about_fake_kernels(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def trace(
    function: Callable[..., Any], mode: Any, inputs: Sequence[Any], known_value: KnownValue
) -> fx.GraphModule:
    """What: make_fx on fakes. Why: it records real autograd and real optimizers. Degraded path: none.

    `known_value(tensor, tracer)` gives the value of a tensor that is the same at each step, else None.
    """
    logger = logging.getLogger(LOGGER_OF_FAKES)  # what it prints is reported here
    logger.addFilter(_about_fake_kernels)
    cached = torch.is_autocast_cache_enabled()
    # not by a closure: frames of torch hold it as long as somebody keeps an error
    held: list[Any] = [function, inputs]
    tracers: list[Any] = []

    def run() -> Any:
        # make_fx switches it off, and each use of a weight would be cast apart
        torch.set_autocast_cache_enabled(cached)
        tracer = current_tracer()
        tracers.append(tracer)
        record_directly(tracer)
        add_inputs(held[1], tracer)
        with results_by_value(mode, lambda tensor: known_value(tensor, tracer)):
            return held[0](*held[1])

    try:
        with mode, _code_on_demand(), _modules_left_alone(), _no_notes(), results_by_form(mode):
            traced: fx.GraphModule = torch.fx.experimental.proxy_tensor.make_fx(
                run, tracing_mode="real", _allow_non_fake_inputs=True, _allow_fake_constant=True
            )()
    except BaseException:
        for node in (node for tracer in tracers for node in tracer.graph.nodes):
            node.meta.clear()  # of their fakes
        raise
    finally:
        held.clear()
        logger.removeFilter(_about_fake_kernels)
    return traced


@contextmanager
def _modules_left_alone() -> Iterator[None]:
    """What: the patcher of fx for make_fx's own trace, replaced by one that patches nothing. Why: it would wrap the
    calls of all modules, and functions in the globals of their code, for every thread, and make_fx needs none of that.
    Besides, what `torch.compile` has wrapped runs its own Python: Dynamo asks a flag of the process, and would raise in
    other threads. Degraded path: other threads run through those wrappers, which do nothing there.
    """
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    symbolic: Any = importlib.import_module("torch.fx._symbolic_trace")
    with ExitStack() as stack:
        stack.enter_context(dynamo.patch(error_on_nested_fx_trace=False))
        if hasattr(symbolic, "_Patcher") and hasattr(symbolic, "_new_patcher"):

            class Idle(symbolic._Patcher):  # type: ignore[misc]
                def patch(self, *_args: Any, **_kwargs: Any) -> None: ...
                def patch_method(self, *_args: Any, **_kwargs: Any) -> None: ...
                def visit_once(self, _thing: object) -> bool:
                    return False

            usual, idle = symbolic._new_patcher, [Idle()]  # a trace by the user, inside of ours, has its own
            replace_here(stack, symbolic, "_new_patcher", lambda: idle.pop() if idle else usual())
        yield


@contextmanager
def _no_notes() -> Iterator[None]:
    """What: what make_fx notes of each function and tensor besides, a mode for all torch functions and a second
    description. Why: nothing of ours reads it, and the mode sees each question of a kernel for fakes: a tenth of a
    capture. Degraded path: it is noted.
    """
    proxies: Any = torch.fx.experimental.proxy_tensor
    with ExitStack() as stack:
        if hasattr(proxies, "TorchFunctionMetadataMode"):
            replace_here(stack, proxies, "TorchFunctionMetadataMode", lambda _tracer: nullcontext())
        if hasattr(proxies, "_extract_tensor_metadata"):
            replace_here(stack, proxies, "_extract_tensor_metadata", lambda *_: None)
        yield


def _code_on_demand() -> Any:
    """What: traced modules write their Python when it is asked for. Why: a trace writes it several times over, a tenth
    of the capture of a small step. Degraded path: it is written at once.
    """
    module = sys.modules.get("torch.fx._lazy_graph_module")
    lazily: Any = getattr(module, "_use_lazy_graph_module", None)
    return nullcontext() if lazily is None else lazily(True)


@contextmanager
def tracing_patches(
    around_branches: Callable[[Callable[..., Any]], Callable[..., Any]], fake: Callable[[Any], Any]
) -> Iterator[None]:
    """Pieces of torch that a trace cannot see through, replaced for its duration.

    Modules wrapped by `torch.compile` run their own Python.
    `torch.cond` and its like let Dynamo find what their branches close over: `around_branches` wraps the function
    that does so.
    `module.to(...)` of a module that is there already moves nothing, where torch would exchange its fake parameters.
    Attention and encoder layers ask for function modes and for make_fx before they take their fused inference
    kernels; they see neither, since eager mode has none and its fused kernels round differently.
    `vmap` and the transforms of `torch.func` wrap what they are given in C++, where no function mode puts a fake in the place
    of a tensor: `fake` gives it before.
    """
    attention = importlib.import_module("torch.nn.modules.activation")
    with ExitStack() as stack:
        stack.enter_context(exact_arithmetic())
        for owner, name, value in (
            (torch.nn.Module, "_apply", _move_if_needed(torch.nn.Module._apply)),
            (torch.overrides, "has_torch_function", lambda _arguments: False),
            (attention, "_is_make_fx_tracing", lambda: False),
        ):
            replace_here(stack, owner, name, value)
        for transform, name in (("vmap", "_add_batch_dim"), ("eager_transforms", "_wrap_for_grad")):
            module = importlib.import_module(f"torch._functorch.{transform}")
            if (wrap := getattr(module, name, None)) is not None:
                replace_here(stack, module, name, _with_fake(wrap, fake))
        stack.enter_context(branches_compiled(around_branches))
        # what parametrize.cached() keeps is for all code, which must find no fakes there
        stack.enter_context(replaced(torch.nn.utils.parametrize, "_cache", {}))
        yield


def _with_fake(wrap: Callable[..., Any], fake: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda tensor, *how: wrap(fake(tensor), *how)


def _move_if_needed(move: Any) -> Callable[..., Any]:
    def apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        if all(function(tensor) is tensor for tensor in tensors):
            return module
        return move(module, function, recurse)

    return apply
