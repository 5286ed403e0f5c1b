"""verify: a step of the graph beside the eager one, from the same state, with everything put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from monograph.capture.signature import Call
from monograph.capture.state import Holdings
from monograph.compiler import Build
from monograph.inspect.comparison import Compared, compare, is_fine, near_float64, same_bits_of
from monograph.inspect.eager_log import EagerLog
from monograph.inspect.exact import Exact
from monograph.inspect.kept import Kept
from monograph.inspect.locate import FirstDifference, locate
from monograph.inspect.repro import write_repro
from monograph.inspect.state import KINDS, RESULTS, After, after_step
from monograph.inspect.walk import own_inputs
from monograph.ir.tree import flatten, leaf_paths
from monograph.runtime.judge import FloatReport

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
        graph, truths, build = _graph_steps(subject, steps, against)
        kept.restore()
        eager = _eager_steps(subject, steps)
        kept.restore()
        moving = _moving(build, subject.recapture())
        kept.restore()
        compared: list[Compared] = []
        judged: dict[str, FloatReport] = {}
        wrong: int | None = None
        for number, sides in enumerate(zip(eager, graph, truths, strict=True)):
            found, verdict = compare(number, *sides)
            compared += found
            judged |= {kind: item for kind, item in verdict.items() if kind not in judged or not item.ok}
            if wrong is None and not is_fine(found, verdict):
                wrong = number
        first = None if wrong is None else _located(subject, wrong, bitwise=_is_bitwise(build))
    finally:
        kept.restore()
    ok = wrong is None and not moving
    return VerifyReport(
        subject.name, build.backend, steps, against, tuple(compared), judged, first, moving, ok
    )


def _is_bitwise(build: Build) -> bool:
    """False if a pass or a kernel choice is on that may round."""
    settings = build.settings
    rounding = (
        settings.is_on(settings.fuse_cast_scale),
        settings.is_on(settings.fuse_add_to_output),
        settings.fuse_model_update_ops,
        settings.is_on(settings.kernel_selection),
    )
    return build.backend == "aten" and not any(rounding)


def _given(call: Call) -> dict[str, Any]:
    return dict(zip(call.paths(), call.leaves, strict=True))


def _graph_steps(
    subject: Subject, steps: int, against: str
) -> tuple[list[After], list[list[dict[str, Any]]], Build]:
    """What each step of the graph leaves behind, and its float64 values if they are needed."""
    after: list[After] = []
    truths: list[list[dict[str, Any]]] = []
    exact = Exact()
    for _ in range(steps):
        build, bound = subject.prepare()
        judged = against == "float64" or not _is_bitwise(build)
        found = exact.step(build, own_inputs(bound)) if judged else []
        after.append(after_step(subject.holdings, subject.run_graph(), _given(subject.call)))
        truths.append([truth.by_path(list(after[-1][RESULTS])) for truth in found])
    return after, truths, build


def _eager_steps(subject: Subject, steps: int) -> list[After]:
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
        expected = {path: item for kind in KINDS for path, item in after[kind].items()}
        leaves: list[Any] = []
        tree = flatten(returned, leaves)
        for path, index in zip(leaf_paths(tree, "result"), build.executor.results, strict=True):
            if index is not None:
                expected[build.program.outputs[index].path] = after[RESULTS][path]
        agrees = same_bits_of if bitwise else near_float64(build, inputs)
        return locate(build, inputs, expected, log.ops, agrees)
    finally:
        kept.restore()
