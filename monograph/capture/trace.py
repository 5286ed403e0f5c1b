"""capture(): trace the user's step once and make a program of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import fx

from monograph.capture.captured import Captured, committed
from monograph.capture.errors import translated
from monograph.capture.guards.sources.questions import answers
from monograph.capture.numbers.known import known_value
from monograph.capture.ports import graph_signature
from monograph.capture.process.signals import handlers_held_back
from monograph.capture.step.generators import KnownGenerators
from monograph.capture.step.request import Request
from monograph.capture.step.unread_inputs import check_ints
from monograph.capture.tensors.functional.functionalise import functionalise
from monograph.capture.tensors.functional.overlaps import check_own_memory, looked_beyond
from monograph.capture.tensors.functional.view_writes import write_directly
from monograph.capture.tensors.functional.written_twice import check_writes
from monograph.capture.traced import trace_step
from monograph.compat.amp import is_dynamic_scaler, make_scale, without_autocast
from monograph.compat.distributed.groups import num_processes
from monograph.compat.fake_values import VALUES_NOT_KNOWN, is_unlike_formula
from monograph.compat.fakes import (
    import_capture_modules,
    missing_fake_kernel,
    refused_by_fake_kernel,
)
from monograph.compat.ops import is_custom
from monograph.compat.tensors import planned_device
from monograph.distributed.names import share_names
from monograph.errors import MonographError, capture_error_of, first_line
from monograph.ir.call.signature import Spec
from monograph.ir.graph_signature import Copy
from monograph.ir.meta import origin
from monograph.ir.ops.one_dtype import refused_dtypes
from monograph.ir.port import Role
from monograph.ir.printer import short_target
from monograph.settings import PLAIN
from monograph.state.collector import rare_collections
from monograph.state.find import Owned, check_owned
from monograph.state.signals import held_back
from monograph.state.snapshot import take_snapshot, torch_modes

WITH_VALUES: Final = (
    "on copies of the real tensors, which is normal for ops whose results torch cannot describe beforehand"
)
MEND_KERNEL: Final = "correct the function that is given to register_fake: torch.library.opcheck() tests it"
LOGGER = logging.getLogger("monograph")
_P = ParamSpec("_P")
_T = TypeVar("_T")
TRACE_LOCK = threading.RLock()  # torch's tracing state is per process in places: one trace at a time


def outside_of_traces(look: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run it while no other thread traces: functions of torch are others then, which guards would find changed."""

    @wraps(look)
    def looking(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with TRACE_LOCK:
            return look(*args, **kwargs)

    return looking


def capture(request: Request) -> Captured:
    """Capture a step. On failure everything is as before, and the error names the user's line."""
    import_capture_modules()
    request = replace(request, answers=answers())
    return _in_trace(partial(_captured_on_fakes, request))


def capture_with_values(request: Request) -> Captured:
    """Capture on fakes that carry copies of the real data, for ops whose fake kernel is missing or wrong."""
    request = replace(request, answers=request.answers or answers())

    def captured() -> Captured:
        try:
            return _capture(request, with_values=True)
        except Exception as error:
            raise translated(error, request.owned) from error

    return _in_trace(captured)


def _in_trace(make: Callable[[], Captured]) -> Captured:
    """One trace at a time, and what signal handlers raise after it undoes it."""
    captured: Captured | None = None
    try:
        with TRACE_LOCK, handlers_held_back(), torch_modes(), rare_collections():
            captured = make()
    except BaseException:
        if captured is not None:
            with held_back():
                captured.undo()
        raise
    return captured


def _captured_on_fakes(request: Request) -> Captured:
    try:
        return _capture(request, with_values=False)
    except Exception as error:
        specs = any(isinstance(leaf, Spec) for leaf in request.call.leaves)
        missing = missing_fake_kernel(error)
        refused = refused_by_fake_kernel(error) or is_unlike_formula(error)
        alone = num_processes() == 1  # else values would be sent while others trace
        if isinstance(error, MonographError) or specs or not (alone and (missing or refused)):
            raise translated(error, request.owned) from error
        try:
            captured = capture_with_values(request)
        except Exception as second:
            if missing or VALUES_NOT_KNOWN not in str(second):
                raise  # the real kernel refuses too, in its own words, or the second trace came further
            raise translated(error, request.owned) from error
        for op, what in captured.mended.items():
            if is_custom(op):
                LOGGER.warning("%s: %s gives %s; %s", request.name, op, what, MEND_KERNEL)
        LOGGER.info("%s: captured %s (%s)", request.name, WITH_VALUES, first_line(error))
        return captured


def _capture(request: Request, *, with_values: bool) -> Captured:
    modules = request.owned.named_modules()
    check_owned(request.owned, modules)
    _prepare_scaler(request.owned)
    snapshot = take_snapshot(request.owned, modules)
    generators = KnownGenerators(request, modules)
    traced = trace_step(request, modules, snapshot, generators, with_values=with_values)
    step = traced.step
    share_names(traced.recorded.graph)
    check_ints(
        *(traced.recorded.graph, step.inputs, step.conditions, request.call),
        plain=request.settings.backend == PLAIN,
    )
    check_own_memory(traced.recorded.graph, step.inputs.items)
    check_writes(traced.recorded.graph)
    _check_dtypes(traced.recorded.graph)
    reaching = looked_beyond(traced.recorded.graph, step.inputs.items)
    write_directly(traced.recorded)
    own = step.side_effects.own_memory()
    state_outputs = step.side_effects.state_outputs
    replaced = {
        id(state_output.target.tensor)
        for state_output in state_outputs
        if isinstance(state_output.target, Copy)
    }
    with without_autocast(), step.values(), snapshot.random.kept():
        functional = functionalise(
            traced.recorded,
            step.inputs.mode,
            step.inputs.fakes,
            partial(known_value, literals=step.literals),
            num_state=len(state_outputs),
            overwritten=[i for i, item in enumerate(step.inputs.items) if id(item.real) in replaced],
            replayed=with_values,
        )
    signature = graph_signature(request, step, traced.recorded, functional, reaching=reaching)
    generators.check(item.real for item in step.inputs.items if item.role is Role.RNG)
    return committed(request, modules, traced, signature, own)


def _prepare_scaler(owned: Owned) -> None:
    """A dynamic scaler has its scale from now on, on the device of the first parameter that is trained."""
    trained = [parameter for item in owned.optimizers for parameter in item.parameters]
    held = [p for module in owned.modules.values() for p in module.parameters()]
    if is_dynamic_scaler(owned.scaler):
        make_scale(
            owned.scaler, next((planned_device(p.device) for p in trained + held), torch.device("cpu"))
        )


def _check_dtypes(graph: fx.Graph) -> None:
    """Raise CaptureError for an op that eager mode refuses for the dtypes of its tensors, as an error of that kind."""
    for node in graph.nodes:
        if dtypes := refused_dtypes(node):
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            error = _error_of_kernel(node)
            raise capture_error_of(error)(
                f"{short_target(node.target)} gets tensors of {names}, and takes one dtype; {first_line(error)}",
                where=origin(node),
                hint="convert the arguments before the call, as x.float() does, or the model by model.to(dtype)",
            )


def _error_of_kernel(node: fx.Node) -> Exception:
    """What the op raises for its arguments in eager mode."""

    def zeros(item: fx.Node) -> Any:
        value = item.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    target: Any = node.target
    try:
        target(*fx.map_arg(node.args, zeros), **fx.map_arg(dict(node.kwargs), zeros))
    except Exception as error:
        return error
    return RuntimeError("mixed dtypes")
