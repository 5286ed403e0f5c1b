"""verify: a step of the graph beside the eager one, from the same state, with everything put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from monograph.capture.signature import Call
from monograph.capture.state import Holdings
from monograph.compiler import Build
from monograph.inspect.eager_log import EagerLog
from monograph.inspect.float64 import Float64Walk
from monograph.inspect.kept import Kept
from monograph.inspect.locate import FirstDifference, locate
from monograph.inspect.repro import write_repro
from monograph.inspect.state import OPTIMIZERS, OTHERS, PARAMETERS, RESULTS, after_step
from monograph.inspect.walk import own_inputs
from monograph.ir.port import Role
from monograph.ir.tree import flatten, leaf_paths
from monograph.runtime.judge import Difference, FloatReport, against_float64, differences

_KINDS = (RESULTS, PARAMETERS, OPTIMIZERS, OTHERS)
_SHOWN = 8


@dataclass(frozen=True)
class Subject:
    """What is verified: how to run a step in either way, and what a step changes."""

    name: str
    holdings: Holdings
    call: Call
    keep: Callable[[], Kept]
    run_graph: Callable[[], Any]
    run_eager: Callable[[], Any]
    prepare: Callable[[], tuple[Build, list[Any]]]  # the build for the next step, and its inputs
    recapture: Callable[[], str]  # the text of the program, captured once more


@dataclass(frozen=True)
class Compared:
    """One result or state tensor: how the graph's differs from eager's, if it does."""

    step: int
    kind: str
    path: str
    difference: Difference | None
    ulp: float | None = None  # the largest distance in units in the last place of eager's value
    eager_error: float | None = None  # the largest, against float64
    graph_error: float | None = None

    @property
    def same(self) -> bool:
        """True for equal bits."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.path}: the same bits"
        parts = [str(self.difference)]
        parts += [f"{self.ulp:.3g} ulp at most"] if self.ulp is not None else []
        if self.eager_error is not None:
            parts.append(
                f"against float64 eager errs by {self.eager_error:.3g}, the graph by {self.graph_error:.3g}"
            )
        return ", ".join(parts)


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. `ok` says that the promise holds for this step."""

    graph: str
    backend: str
    steps: int
    against: str
    compared: tuple[Compared, ...]
    judged: Mapping[str, FloatReport]  # by kind, of the worst step; empty if bits were asked for
    first: FirstDifference | None
    moving: tuple[str, ...]  # constants of the capture that another capture finds changed
    ok: bool

    def repro(self, path: str | Path) -> None:
        """Write a script that shows the first difference without the model, and its tensors beside it (safetensors).

        `path` is that of the script, "difference.py". Raises DefinitionError if there is no difference to show.
        """
        first = self.first
        compiled = first is not None and first.cause == "kernels of inductor"
        about = "" if first is None else f"{self.graph}: {first}".replace('"""', "'")
        write_repro(Path(path), about, None if first is None else first.evidence, compiled=compiled)

    def __str__(self) -> str:
        same = sum(item.same for item in self.compared)
        head = f"{self.graph} on {self.backend} against {self.against}, {self.steps} step(s): "
        lines = [head + ("as promised" if self.ok else "NOT as promised")]
        lines.append(f"  {same} of {len(self.compared)} results and state tensors have the same bits")
        for kind, report in self.judged.items():
            if report.distances:
                lines.append(
                    f"  {kind}: error against float64 {report.graph_rms:.3g}, eager's {report.eager_rms:.3g} (rms)"
                )
        different = [item for item in self.compared if not item.same]
        lines += [f"  {item}" for item in different[:_SHOWN]]
        lines += [f"  and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
        lines += [f"  a constant that moves: {line}" for line in self.moving]
        if self.first is not None:
            lines += ["first difference:", *(f"  {line}" for line in str(self.first).splitlines())]
        return "\n".join(lines)


def verify(subject: Subject, *, steps: int, against: str) -> VerifyReport:
    """Run the steps both ways from the present state, and compare what each leaves behind."""
    kept = subject.keep()
    try:
        graph, exact, build = _graph_steps(subject, steps, against)
        kept.restore()
        eager = _eager_steps(subject, steps)
        kept.restore()
        moving = _moving(build, subject.recapture())
        kept.restore()
        bitwise = build.backend == "aten" and not _rounds(build)
        compared: list[Compared] = []
        judged: dict[str, FloatReport] = {}
        wrong: int | None = None
        for number, (one, other) in enumerate(zip(eager, graph, strict=True)):
            truth = exact[number] if exact else {}
            compared += _compared(number, one, other, truth)
            verdict = {} if bitwise and against == "eager" else _judge(one, other, truth)
            judged |= {
                kind: report for kind, report in verdict.items() if kind not in judged or not report.ok
            }
            fine = _is_fine(compared, number, verdict, bitwise=bitwise and against == "eager", truth=truth)
            wrong = number if wrong is None and not fine else wrong
        first = None if wrong is None else _located(subject, wrong, bitwise=bitwise)
    finally:
        kept.restore()
    ok = wrong is None and not moving
    return VerifyReport(
        subject.name, build.backend, steps, against, tuple(compared), judged, first, moving, ok
    )


def _rounds(build: Build) -> bool:
    """True if a pass or a kernel choice that may round is on."""
    settings = build.settings
    return any((
        settings.is_on(settings.fuse_cast_scale), settings.is_on(settings.fuse_add_to_output),
        settings.fuse_model_update_ops, settings.is_on(settings.kernel_selection),
    ))  # fmt: skip


def _given(call: Call) -> dict[str, Any]:
    return dict(zip(call.paths(), call.leaves, strict=True))


def _graph_steps(
    subject: Subject, steps: int, against: str
) -> tuple[list[dict[str, dict[str, Any]]], list[dict[str, Any]], Build]:
    after, exact = [], []
    carried: dict[str, Any] = {}
    for _ in range(steps):
        build, bound = subject.prepare()
        if against == "float64" or build.backend != "aten" or _rounds(build):
            truth, results = _exact_step(build, own_inputs(bound), carried)
            carried = truth
            exact.append((truth, results))
        returned = subject.run_graph()
        after.append(after_step(subject.holdings, returned, _given(subject.call)))
    return (
        after,
        [_with_results(*pair, list(step[RESULTS])) for pair, step in zip(exact, after, strict=False)],
        build,
    )


def _exact_step(
    build: Build, inputs: list[Any], carried: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    """The step in float64: new state by path, and the leaves of what build() returns."""
    program = build.stages[0].program
    wide = [carried.get(port.path, item) for port, item in zip(program.inputs, inputs, strict=True)]
    walk = Float64Walk(program, wide, keep=False)
    outputs = walk.run()
    state = {
        port.path: item
        for port, item in zip(walk.program.outputs, outputs, strict=True)
        if port.role is Role.STATE
    }
    results = [None if index is None else outputs[index] for index in build.executor.results]
    return state, results


def _with_results(state: Mapping[str, Any], results: Sequence[Any], paths: Sequence[str]) -> dict[str, Any]:
    return dict(state) | dict(zip(paths, results, strict=True))


def _eager_steps(subject: Subject, steps: int) -> list[dict[str, dict[str, Any]]]:
    return [after_step(subject.holdings, subject.run_eager(), _given(subject.call)) for _ in range(steps)]


def _moving(build: Build, again: str) -> tuple[str, ...]:
    """The lines of the captured program that another capture writes otherwise."""
    before = build.stages[0].program.text.splitlines()
    pairs = list(zip_longest(before, again.splitlines(), fillvalue=""))
    moved = [(old.strip(), _code(new)) for old, new in pairs if _code(old) != _code(new)]
    return tuple(f"{old} was captured again as {new}" for old, new in moved[:_SHOWN])


def _code(line: str) -> str:
    """A line of a program without its comment, which names the line of the user's call."""
    return line.partition("  # ")[0].strip()


# --- judging ---------------------------------------------------------------------------------------------------------


def _compared(
    step: int,
    eager: Mapping[str, Mapping[str, Any]],
    graph: Mapping[str, Mapping[str, Any]],
    truth: Mapping[str, Any],
) -> Iterator[Compared]:
    for kind in _KINDS:
        for path in dict.fromkeys((*eager[kind], *graph[kind])):
            expected, got = eager[kind].get(path, "nothing"), graph[kind].get(path, "nothing")
            found = next(differences(expected, got, path), None)
            if found is None or not _floating(expected, got):
                yield Compared(step, kind, path, found)
                continue
            errors: list[float] = []
            if isinstance(truth.get(path), torch.Tensor):
                errors = [_error(side, truth[path]) for side in (expected, got)]
            yield Compared(step, kind, path, found, _ulp(expected, got), *errors)


def _floating(expected: Any, got: Any) -> bool:
    both = isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)
    return both and expected.is_floating_point() and expected.shape == got.shape and bool(expected.numel())


def _error(side: torch.Tensor, exact: torch.Tensor) -> float:
    return float((side.double() - exact.double()).abs().max())


def _ulp(expected: torch.Tensor, got: torch.Tensor) -> float:
    limits = torch.finfo(expected.dtype)
    unit = (expected.double().abs() * limits.eps).clamp_min(limits.tiny * limits.eps)
    return float(((got.double() - expected.double()).abs() / unit).nan_to_num(torch.inf).max())


def _judge(
    eager: Mapping[str, Mapping[str, Any]], graph: Mapping[str, Mapping[str, Any]], truth: Mapping[str, Any]
) -> dict[str, FloatReport]:
    """The distances to float64 of each kind."""
    verdict = {}
    for kind in _KINDS:
        paths = [
            path
            for path, item in eager[kind].items()
            if isinstance(truth.get(path), torch.Tensor) and _floating(item, graph[kind].get(path))
        ]
        exact, one, other = (
            {path: values[path] for path in paths} for values in (truth, eager[kind], graph[kind])
        )
        verdict[kind] = against_float64(exact, one, other)
    return verdict


def _is_fine(
    compared: Sequence[Compared],
    step: int,
    verdict: Mapping[str, FloatReport],
    *,
    bitwise: bool,
    truth: Mapping[str, Any],
) -> bool:
    """What has a float64 value is judged by it; all else has eager's bits."""
    strict = [c for c in compared if c.step == step and (bitwise or c.graph_error is None)]
    return all(item.same for item in strict) and all(report.ok for report in verdict.values())


# --- the first difference --------------------------------------------------------------------------------------------


def _located(subject: Subject, number: int, *, bitwise: bool) -> FirstDifference | None:
    """Go to the step that went wrong, and find where."""
    kept = subject.keep()
    try:
        for _ in range(number):
            subject.run_graph()
        build, bound = subject.prepare()
        inputs = own_inputs(bound)
        now = subject.keep()
        with EagerLog(subject.holdings.named_modules()) as log:
            returned = subject.run_eager()
        after = after_step(subject.holdings, returned, _given(subject.call))
        now.restore()
        expected = {path: item for kind in _KINDS for path, item in after[kind].items()}
        leaves: list[Any] = []
        tree = flatten(returned, leaves)
        for path, index in zip(leaf_paths(tree, "result"), build.executor.results, strict=True):
            if index is not None:
                expected[build.program.outputs[index].path] = after[RESULTS][path]
        agrees = _same_bits if bitwise else _near_float64(build, inputs)
        return locate(build, inputs, expected, log.ops, agrees)
    finally:
        kept.restore()


def _same_bits(_name: str, expected: Any, got: Any) -> bool:
    return next(differences(expected, got), None) is None


def _near_float64(build: Build, inputs: Sequence[Any]) -> Callable[[str, Any, Any], bool]:
    """Judges a value of the captured program by its distance to float64; others need the same bits."""
    walk = Float64Walk(build.stages[0].program, inputs)
    outputs = walk.run()
    exact = {node.name: item for node, item in walk.values.items()}
    exact |= dict(zip((port.path for port in walk.program.outputs), outputs, strict=True))

    def agrees(name: str, expected: Any, got: Any) -> bool:
        truth = exact.get(name)
        if not _floating(expected, got) or not isinstance(truth, torch.Tensor) or truth.shape != got.shape:
            return not _floating(expected, expected) or _close(expected, got)
        return against_float64({name: truth}, {name: expected}, {name: got}).ok

    return agrees


def _close(expected: Any, got: Any) -> bool:
    if not _floating(expected, got):
        return True
    return torch.allclose(got.double(), expected.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
