"""Autotuning: candidates for one op run in turn on random data of the real shapes and strides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_input
from monograph.ir.memory import is_view
from monograph.ir.meta import TensorMeta, value
from monograph.ir.own_ops import NATIVE
from monograph.kernels.candidates import Form
from monograph.kernels.compile import Compiled, KernelCompiler, kernel_at
from monograph.layout import extent

Run = Callable[[], tuple[Any, ...]]
Repeat = Callable[[int], Any]  # runs so many times

_SAMPLE = 2e-4  # seconds that one sample lasts at least
_ENOUGH = 0.05  # seconds after which timing ends, if each candidate has run often enough
_AT_MOST = 3.0
_ROUNDS = (2, 5)  # at least, where an op is very slow; where it is not
_MOST_BYTES = 1 << 30  # of operands that are made for timing


def seconds_of(
    forms: Sequence[Form], inputs: Sequence[TensorMeta], compiler: KernelCompiler
) -> dict[str, float]:
    """The time of each form by name, the first one's first. Forms that fail, or are less exact, are left out."""
    if sum(item.nbytes for item in inputs) > _MOST_BYTES:
        return {}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        tensors = [_random(item, seed) for seed, item in enumerate(inputs)]
        runs: dict[str, Repeat] = {}
        expected: tuple[Any, ...] | None = None
        for form in forms:
            try:
                trial = timed(form, tensors, compiler)
                results = _flat(trial.run()())
                if expected is None:
                    expected, exact = results, _exact(form, tensors, compiler) if len(forms) > 1 else results
            except RuntimeError:  # no kernel for this type on this processor
                if expected is None:
                    return {}
                continue
            if all(map(_is_as_near, results, expected, exact)):
                runs[form.name] = trial.repeat()
        return fastest_of_many(runs)


def fastest_of_many(runs: Mapping[str, Repeat]) -> dict[str, float]:
    """The smallest time of one run of each, all of them in turn so that a disturbance meets them alike."""
    # the time of one thread is not moved by other programs; what several threads take only a wall clock measures
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats = {
        name: max(1, min(200, int(_SAMPLE / max(_sample(run, 1, clock), 1e-7)))) for name, run in runs.items()
    }
    best = dict.fromkeys(runs, float("inf"))
    start, rounds = time.perf_counter(), 0
    while True:
        for name, run in runs.items():
            best[name] = min(best[name], _sample(run, repeats[name], clock))
        rounds, elapsed = rounds + 1, time.perf_counter() - start
        if (rounds >= _ROUNDS[1] and elapsed > _ENOUGH) or (rounds >= _ROUNDS[0] and elapsed > _AT_MOST):
            return best


def _sample(run: Repeat, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    run(repeats)
    return (clock() - start) / repeats


@dataclass(frozen=True)
class Timed:
    """A form bound to tensors: the ops that are timed, and what they begin with."""

    graph: fx.Graph
    bound: tuple[torch.Tensor, ...]

    def run(self) -> Run:
        """The form as a function."""
        call, bound = fx.GraphModule(torch.nn.Module(), self.graph).forward, self.bound
        return lambda: call(*bound)

    def repeat(self) -> Repeat:
        """What is timed. Code of our own repeats itself: a compiled step calls it without Python."""
        ops = [node for node in self.graph.nodes if node.op == "call_function"]
        own = getattr(ops[0].target, "__self__", None) if len(ops) == 1 else None
        if isinstance(own, Compiled):
            given = dict(zip(self.graph.find_nodes(op="placeholder"), self.bound, strict=True))
            operands = [given[item] for item in ops[0].args if isinstance(item, fx.Node)]
            return lambda count: own.repeat(count, *operands)
        run = self.run()

        def repeat(count: int) -> None:
            for _ in range(count):
                run()

        return repeat


def timed(form: Form, tensors: Sequence[torch.Tensor], compiler: KernelCompiler) -> Timed:
    """A form on tensors. Views of them are made beforehand: compiled code makes none at run time.

    Raises RuntimeError if code of our own cannot be compiled.
    """
    graph = fx.Graph()
    ready: dict[fx.Node, torch.Tensor] = {}
    new: dict[fx.Node, fx.Node] = {}
    given = iter(tensors)
    for node in form.graph.nodes:
        if node.op == "placeholder":
            ready[node] = next(given)
        elif is_view(node) and all(item in ready for item in node.all_input_nodes):
            ready[node] = node.target(*fx.map_arg(node.args, ready.__getitem__))
    for node in ready:
        new[node] = named_input(graph, node.name)
    for node in form.graph.nodes:
        if node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
            if node.target in NATIVE:
                new[node].target = compiler.compiled(kernel_at(node)).once
    return Timed(graph, tuple(ready.values()))


def _random(described: TensorMeta, seed: int) -> torch.Tensor:
    """Numbers of a normal distribution, in memory laid out as described; the user's generator is left alone.

    Integers are 0, which is a place in anything.
    """
    generator = torch.Generator().manual_seed(seed)
    size = extent(described.shape, described.stride)
    if not described.dtype.is_floating_point:
        return torch.zeros(size, dtype=described.dtype).as_strided(described.shape, described.stride)
    memory = torch.randn(size, generator=generator).to(described.dtype)
    return memory.as_strided(described.shape, described.stride)


def _flat(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of an op itself stand in one tuple more than those of a form with one op for each."""
    return results[0] if isinstance(results[0], tuple) else results


def _exact(form: Form, tensors: Sequence[torch.Tensor], compiler: KernelCompiler) -> tuple[Any, ...]:
    """What a form gives in float64."""
    return _flat(
        timed(
            form, [item.double() if item.is_floating_point() else item for item in tensors], compiler
        ).run()()
    )


def _is_as_near(result: Any, expected: Any, exact: Any) -> bool:
    """True if a kernel is as near to float64 as a compiled step has to be, compared with the default kernel."""
    if not isinstance(expected, torch.Tensor) or result is None:
        return result is None or expected is None
    if not expected.is_floating_point():
        return torch.equal(result, expected)
    factor = 2 if expected.dtype is torch.float32 else 3
    rounding = torch.finfo(expected.dtype).eps / 4 * exact.double().norm()
    distances = [(item.double() - exact).norm() for item in (result, expected)]
    return bool(distances[0] <= factor * torch.maximum(distances[1], rounding))


def tensors_of(form: Form) -> list[TensorMeta]:
    """The descriptions of the tensors that a form takes."""
    found = [value(node) for node in form.graph.find_nodes(op="placeholder")]
    return [item for item in found if isinstance(item, TensorMeta)]
