"""How long an operator takes in eager mode and as a graph, as a table."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec

import torch
from rich.console import Console
from rich.table import Table

from monograph.testing import environment
from monograph.testing.alignment.arguments import Arguments
from monograph.testing.alignment.step import AlignedStep, Backward, run_step, starts_of

_P = ParamSpec("_P")


@dataclass(frozen=True)
class Timing:
    """Seconds of each run of one mode."""

    mode: str  # "eager" or "graph"
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle run."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """From the first quartile to the third."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return high - low


@dataclass(frozen=True)
class ProfileResult:
    """One call of the operator, timed in both modes."""

    name: str
    description: str
    arguments: str  # shapes and dtypes
    backward: bool  # forward and backward, else forward alone
    threads: int
    eager: Timing
    graph: Timing

    @property
    def speedup(self) -> float:
        """How many times faster the graph is."""
        return self.eager.median / self.graph.median


Hook = Callable[[list[ProfileResult]], object]


@dataclass
class _Profiler:
    target: Any
    found: list[ProfileResult] = field(default_factory=list)


_ACTIVE: Final[ContextVar[_Profiler | None]] = ContextVar("monograph_profile", default=None)


def profile(
    operator: Any, *, hook: Hook | None = None, show: bool = True
) -> Callable[[Callable[_P, Any]], Callable[_P, list[ProfileResult]]]:
    """Time each call of `operator` that the decorated function makes through the dual torch, in both modes.

    Runs of eager mode and of the graph take turns, after a warm-up; `MONOGRAPH_PROFILE_WARMUP` (3) and
    `MONOGRAPH_PROFILE_RUNS` (30) say how many. Where a gradient is possible, forward with backward is timed too. A
    call may carry `profile_description="..."`, which the operator does not see. The function gives the results, prints
    them as a table if `show`, and hands them to `hook`.

    >>> from monograph.testing.dual import torch as dual_torch
    >>> @profile(dual_torch.nn.functional.relu, show=False)
    ... def relu():
    ...     dual_torch.nn.functional.relu(dual_torch.ones(2, 3), profile_description="small")
    >>> [(result.description, result.backward) for result in relu()]
    [('small', False), ('small', True)]
    """
    target = getattr(operator, "pytorch", operator)

    def decorate(function: Callable[_P, Any]) -> Callable[_P, list[ProfileResult]]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> list[ProfileResult]:
            with _profiling(target) as profiler:
                function(*args, **kwargs)
            if not profiler.found:
                name = getattr(target, "__name__", "the operator")
                warnings.warn(
                    f"{function.__name__}() never called {name} through the dual torch", stacklevel=2
                )
            if show:
                Console(width=150).print(table(profiler.found))
            if hook is not None:
                hook(profiler.found)
            return profiler.found

        return run

    return decorate


def table(results: Sequence[ProfileResult]) -> Table:
    """The results as a table, one row for each timed call."""
    made = Table(title="eager mode and graph: median of a call, spread between the quartiles")
    for heading in ("operator", "arguments", "step", "threads", "runs"):
        made.add_column(heading)
    for heading in ("eager", "graph", "eager / graph"):
        made.add_column(heading, justify="right")
    for result in results:
        name = f"{result.name}: {result.description}" if result.description else result.name
        step = "forward + backward" if result.backward else "forward"
        runs = str(len(result.eager.seconds))
        times = (_told(result.eager), _told(result.graph), f"{result.speedup:.2f}")
        made.add_row(name, result.arguments, step, str(result.threads), runs, *times)
    return made


def observe(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Time this call if a profile asks for its target. Gives the keyword arguments that torch is to see."""
    profiler = _ACTIVE.get()
    if profiler is None:
        return kwargs
    description = kwargs.get("profile_description", "")
    kwargs = {name: value for name, value in kwargs.items() if name != "profile_description"}
    if target is profiler.target:
        given = Arguments(args, kwargs)
        for differentiate in (False, True):
            step = _backward(target, given) if differentiate else None
            if step is not None or not differentiate:
                profiler.found.append(_timed(target, given, step, str(description)))
    return kwargs


@contextmanager
def _profiling(target: Any) -> Iterator[_Profiler]:
    profiler = _Profiler(target)
    token = _ACTIVE.set(profiler)
    try:
        yield profiler
    finally:
        _ACTIVE.reset(token)


def _backward(target: Any, given: Arguments) -> Backward | None:
    """Where backward starts, with gradients for all floating-point arguments; None if there is none to take."""
    wanted = tuple(tensor.is_floating_point() or tensor.is_complex() for tensor in given.tensors())
    if not any(wanted):
        return None
    try:
        result = run_step(target, given.copied().requiring(wanted), None, ()).result
    except RuntimeError:  # changes its argument in place
        return None
    leaves = starts_of(result, [])
    starts = tuple(
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    )
    return Backward(wanted, starts, through_clones=False) if starts else None


def _timed(target: Any, given: Arguments, backward: Backward | None, description: str) -> ProfileResult:
    """Both modes in turns, on copies of the same arguments."""
    wanted = backward.wanted if backward else (False,) * len(given.tensors())
    gradients: list[torch.Tensor] = []
    if backward is not None:
        leaves = starts_of(run_step(target, given.copied().requiring(wanted), None, ()).result, [])
        gradients = [torch.ones_like(leaves[start]) for start in backward.starts]
    graph = AlignedStep(target, backward, None)
    steps: dict[str, Callable[[Arguments], Any]] = {
        "eager": lambda ready: run_step(target, ready, backward, gradients),
        "graph": lambda ready: graph(ready.args, ready.kwargs, gradients),
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    warmup, runs = environment.profile_runs()
    for number in range(warmup + runs):
        for mode, step in steps.items():
            ready = given.copied().requiring(wanted)
            begin = time.perf_counter()
            step(ready)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= warmup:
                seconds[mode].append(time.perf_counter() - begin)
    name = getattr(target, "__name__", type(target).__name__)
    timings = {mode: Timing(mode, tuple(found)) for mode, found in seconds.items()}
    forms = ", ".join(_form(leaf) for _, leaf in given.leaves())
    return ProfileResult(name, description, forms, backward is not None, torch.get_num_threads(), **timings)


def _form(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def _told(timing: Timing) -> str:
    return f"{timing.median * 1e6:.1f} ± {timing.spread * 1e6:.1f} µs"
