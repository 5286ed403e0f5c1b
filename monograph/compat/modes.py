"""The modes of this thread: TorchFunctionMode, TorchDispatchMode, the proxy mode of a trace, and the profiler.

Stacks in `torch._C`. Without their getters modes around a call are not seen; nothing else goes without them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from monograph.compat.distributed.tensors import is_sharded_type
from monograph.compat.ops import is_random
from monograph.compat.patching import replace, replace_here, replaced
from monograph.compat.tensors import FORM_GETTERS


def is_tracing() -> bool:
    """True if a trace is running in this thread."""
    return torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None


def current_tracer() -> Any:
    """The tracer of the trace that is running in this thread."""
    mode = torch.fx.experimental.proxy_tensor.get_proxy_mode()
    assert mode is not None, "only called while tracing"
    return mode.tracer


@contextmanager
def without_function_mode() -> Iterator[None]:
    """What: our function mode off the stack. Why: Dynamo cannot trace through it. Degraded path: none."""
    with torch.fx.experimental.proxy_tensor._make_temp_remove_mode_context_manager(FunctionMode)():
        yield


# What: no function mode sees what runs inside. Why: properties of real tensors, asked for in the middle of a trace, and ops of
# a program. Degraded path: none.
outside_of_function_modes: Callable[[], Any] = torch._C.DisableTorchFunction


@contextmanager
def unrecorded() -> Iterator[None]:
    """What: tracing off, fakes on. Why: to run Python for what it reads. Degraded path: none."""
    with torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing():
        yield


class FunctionMode(TorchFunctionMode):
    """A mode that shows every torch function with its arguments to `see`, which may replace the call.

    It does not show what is asked of a fake about its form: most calls of a trace are that. `as_numbers` is given what
    they give, and what functions give.
    """

    def __init__(
        self,
        see: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        as_numbers: Callable[[Any], Any] = lambda item: item,
    ) -> None:
        super().__init__()
        self._see, self._as_numbers = see, as_numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORM_GETTERS and isinstance(args[0], torch._subclasses.fake_tensor.FakeTensor):
            return self._as_numbers(func(*args))
        return self._as_numbers(self._see(_called(func), args, kwargs or {}))


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_THEIRS = (_TORCH, _OURS)  # ours are in places of torch's while a step is captured


def _called(func: Any) -> Any:
    """The function that was called. Torch reports what has its name now, where somebody may have put another."""
    if type(func) is not FunctionType or func.__code__.co_filename.startswith(_THEIRS):
        return func
    frame = sys._getframe(2)
    caller = frame.f_back
    theirs: Any = None
    if caller is not None and frame.f_code.co_filename.startswith(
        _TORCH
    ):  # torch.overrides: a function in Python
        if caller.f_code is not func.__code__:
            theirs = FunctionType(caller.f_code, caller.f_globals, caller.f_code.co_name)
    else:  # a method in C++
        names = [name for name, value in vars(torch.Tensor).items() if value is func]
        theirs = getattr(torch._C.TensorBase, names[0], None) if names else None
    if theirs is None:
        return func

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # other modes would see the same
            return theirs(*args, **kwargs)

    return called


@contextmanager
def around_dispatch(
    begin: Callable[[], Any], end: Callable[[Any], object], answer: Callable[..., Any], unknown: object
) -> Iterator[None]:
    """Call `begin()` before each operation that is recorded by this thread, and `end` with what that gives after it.

    `answer(run, func, args, kwargs)` may give the result of an operation itself, or `unknown`; `run` records another.
    What: the method of the tracing mode. Why: only there torch's tracing begins, and its Python is none of the
    step's. Degraded path: that Python is taken for the step's too, which costs time.
    Devices are no operations.
    """
    mode = torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode
    thread, original = threading.get_ident(), mode.__torch_dispatch__
    held = [answer]  # not by the closure: a frame of it lives as long as somebody keeps an error

    fake, device = torch._subclasses.fake_tensor.FakeTensor, torch.ops.prim.device.default

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device and type(args[0]) is fake and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # what most calls ask for, and what the mode for fakes would give

        def run(func: Any, args: Any, kwargs: Any) -> Any:
            return original(self, func, types, args, kwargs)

        if threading.get_ident() != thread:
            return original(self, func, types, args, kwargs)
        begun = begin()
        try:
            answered = held[0](run, func, args, kwargs or {})
            return answered if answered is not unknown else run(func, args, kwargs)
        finally:
            end(begun)

    try:
        with replaced(mode, "__torch_dispatch__", dispatch):
            yield
    finally:
        held.clear()


@contextmanager
def other_threads_reported(
    mode: Any, used: Callable[[], None], started: Callable[[], None]
) -> Iterator[None]:
    """Call `used()` in any other thread that works with a fake of `mode`, or with tensors in a thread that this one
    has started, and `started()` when it starts one.

    What: the dispatch of FakeTensorMode, and the function of `threading` that starts threads. Why: torch's modes are
    those of a thread, so that a trace sees nothing of what others do. Degraded path: their results are constants.
    """
    thread, dispatch, running = threading.get_ident(), mode.dispatch, [True]

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            used()
        return dispatch(*args, **kwargs)

    def report() -> None:
        if running:
            used()

    def starting(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(run: Any, *args: Any, **kwargs: Any) -> Any:
            if type(getattr(run, "__self__", None)).__module__.startswith(_OWN_THREADS):
                return start(run, *args, **kwargs)
            started()

            def watched(*given: Any) -> Any:
                with OtherThread(report):
                    return run(*given)

            return start(watched, *args, **kwargs)

        return begin

    with ExitStack() as stack:
        replace(stack, mode, "dispatch", dispatched)
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if (start := getattr(threading, name, None)) is not None:
                replace_here(stack, threading, name, starting(start))
        try:
            yield
        finally:
            running.clear()


_OWN_THREADS = ("tqdm._monitor", "torch.")


class OtherThread(TorchDispatchMode):
    """Reports each op in a thread."""

    def __init__(self, report: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._report()
        return func(*args, **(kwargs or {}))


# What: a guard that switches TorchDispatchModes off. Why: a mode sees the program's ops and nothing else, while
# write-backs belong to the executor. Degraded path: modes see the write-backs too.
hidden_from_dispatch_modes: Callable[[], Any] = getattr(torch._C, "_DisableTorchDispatch", nullcontext)


def watching_results(see: Callable[[Any, Any], None]) -> Any:
    """A mode that shows every op that runs, and its result, to `see`; of DTensors the ops that they come down to."""

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(map(is_sharded_type, types)):
                return NotImplemented  # its turn comes again
            result = func(*args, **(kwargs or {}))
            see(func, result)
            return result

    return Watching()  # type: ignore[no-untyped-call]


@contextmanager
def calls_seen() -> Iterator[list[tuple[Any, Any]]]:
    """Gives a list that gets every op inside with its arguments, those by position and those by name."""
    seen: list[tuple[Any, Any]] = []

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, [args, kwargs or {}]))
            return func(*args, **(kwargs or {}))

    with Seeing():  # type: ignore[no-untyped-call]
        yield seen


@contextmanager
def watching_draws() -> Iterator[list[Any]]:
    """Gives a list that gets every op inside that draws from a random generator."""
    drawn: list[Any] = []
    with watching_results(lambda op, _result: drawn.append(op) if is_random(op) else None):
        yield drawn


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """What: dispatch modes off. Why: real work in the middle of a fake run. Degraded path: none."""
    modes = torch.utils._python_dispatch
    with modes._disable_current_modes():
        yield


def default_devices() -> tuple[torch.device, ...]:
    """The devices of `with torch.device(...)` and of `torch.set_default_device`, the outermost first."""
    if not num_function_modes():
        return ()
    return tuple([mode.device for mode in _function_modes() if _is_device_context(mode)])


# What: the stacks of modes of this thread. Why: replayed steps call no torch function, and compiled ones no op.
# Degraded path: modes around a call are not seen.
num_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", int)
num_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(index) for index in range(num_function_modes())]


def _is_device_context(mode: Any) -> bool:
    return type(mode).__module__ == "torch.utils._device"


def foreign_function_mode() -> str | None:
    """The class of a TorchFunctionMode around this call that is not torch's own for default devices."""
    if not num_function_modes():
        return None
    return next((type(mode).__name__ for mode in _function_modes() if not _is_device_context(mode)), None)


def dispatch_mode() -> str | None:
    """The class of the innermost TorchDispatchMode around this call."""
    found = [torch._C._get_dispatch_stack_at(index) for index in range(num_dispatch_modes())]
    return next((type(mode).__name__ for mode in reversed(found) if type(mode) is not OtherThread), None)


# True while a profiler of torch watches this thread. Degraded path: False.
profiler_is_on: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", bool)


@contextmanager
def profiler_marks() -> Iterator[Callable[[str | None], None]]:
    """Gives a function that begins a span of the profiler's trace by its name and ends the one before."""
    spans: list[Any] = []

    def mark(name: str | None) -> None:
        if spans:
            spans.pop().__exit__(None, None, None)
        if name is not None:
            spans.append(torch.profiler.record_function(name))
            spans[-1].__enter__()

    try:
        yield mark
    finally:
        mark(None)


@contextmanager
def kernel_grad_mode(enabled: bool | None) -> Iterator[None]:
    """Inside, kernels that look at grad mode see `enabled`, and autograd records nothing; None changes nothing.

    What: the guard below which torch's own kernels run. Why: a kernel that is run again for a trace takes the branch of
    the first time. Degraded path: it sees the mode of now.
    """
    below = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
    if enabled is None or below is None:
        yield
        return
    with torch.set_grad_enabled(enabled), below():
        yield


def opaque_to_dynamo(function: Any) -> Any:
    """A function whose frames `torch.compile` does not trace, nor those of what it calls: it runs as it is, between two traces.

    What: the marks of `torch.compiler.disable`, whose wrapper would import `torch._dynamo` and cost each call. Why: a graph may be
    called inside of a compiled function. Degraded path: Dynamo traces it, and fails.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a graph is one program already"
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if isinstance(function, FunctionType) and hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
