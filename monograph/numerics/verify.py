"""verify: a step of the graph beside the eager one, from the same state, with everything put back afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx
from torch.optim import Optimizer

from monograph.compat.distributed.groups import group_size
from monograph.compiler import Build
from monograph.distributed.programs.collectives import calls_in_order
from monograph.distributed.zero import parts_of_whole
from monograph.errors import DefinitionError, MonographError, capture_error_of, first_line, shown
from monograph.inspect.walk import own_inputs
from monograph.ir.call.signature import Call
from monograph.ir.call.tree import flatten, leaf_paths
from monograph.ir.meta import compute_nodes, origin
from monograph.ir.printer import call_text
from monograph.ir.program import Program
from monograph.ir.text import Displayed, Rows
from monograph.numerics.comparison import Compared, compare, is_fine, near_float64, same_bits_of
from monograph.numerics.eager_log import EagerLog
from monograph.numerics.float64_steps import Exact, Truth
from monograph.numerics.judge import FloatReport
from monograph.numerics.locate import KERNELS, FirstDifference, locate, not_repeatable, same_value
from monograph.numerics.repro import write_repro
from monograph.numerics.state import KINDS, OPTIMIZERS, RESULTS, After, after_step, first_entries
from monograph.numerics.subject import Subject, looking_at
from monograph.passes.table import keeps_bits
from monograph.user_code.lines import user_place_of

_SHOWN = 8
_TOGETHER = "no op by itself errs by more than rounding: what several ops round adds up, which is rare and no fault of one"
_NOT_AGAIN = "no op differed when the step was run again: something in it is not repeatable"
_NEARBY, _MORE_NEARBY = 4, 20  # more of them where the first do not explain how far the graph is from float64


@dataclass(frozen=True, repr=False)
class VerifyReport(Displayed):
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
    ranks: tuple[int, ...] = ()  # where it does not hold, if several processes take the step
    padded: str = ""  # which sizes of the arguments were padded, and to what
    made: str = ""  # the build that was made for this call, if none of those that there were served it
    idle: tuple[
        str, ...
    ] = ()  # optimizers whose learning rate is 0, so that nothing shows whether they are right

    def repro(self, path: str | Path) -> None:
        """Write a script that shows the first difference without the model, and its tensors beside it (safetensors).

        `path` is that of the script, "difference.py". Raises DefinitionError if there is no difference to show.
        """
        first = self.first
        compiled = first is not None and first.cause == f"{KERNELS} inductor"
        about = "" if first is None else f"{self.graph}: {first}".replace('"""', "'")
        write_repro(Path(path), about, None if first is None else first.evidence, compiled=compiled)

    def __str__(self) -> str:
        same = sum(item.same for item in self.compared)
        head = f"{self.graph} on {self.backend} against {self.against}, {self.steps} step(s): "
        lines = [head + ("as promised" if self.ok else "NOT as promised")]
        lines.append(f"  {same} of {len(self.compared)} results and state tensors have the same bits")
        lines += [f"  compared on padded arguments: {self.padded}"] if self.padded else []
        lines += [f"  no build of the graph served this call: {self.made}"] if self.made else []
        lines += [f"  the learning rate of {name} is 0: its updates show nothing" for name in self.idle]
        for kind, report in self.judged.items():
            if report.distances:
                lines.append(
                    f"  {kind}: error against float64 {report.graph_rms:.3g}, eager's {report.eager_rms:.3g} (rms)"
                )
        lines += [f"a constant that moves: {line}" for line in self.moving]
        lines += [f"not as promised on rank {', '.join(map(str, self.ranks))}"] if self.ranks else []
        if self.first is not None:
            lines += ["first difference:", *(f"  {line}" for line in str(self.first).splitlines())]
        elif not (self.ok or self.moving or self.ranks):
            lines.append(_TOGETHER if self.judged else _NOT_AGAIN)
        different = [item for item in self.compared if not item.same]
        lines += ["other bits:"] if different else []
        lines += [f"  step {item.step}: {item}" for item in different[:_SHOWN]]
        lines += [f"  and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
        return "\n".join(lines)


def verify(
    graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, steps: int, against: str
) -> VerifyReport:
    """Run the steps of a Graph both ways from the present state, and compare what each makes and changes."""
    if against not in ("eager", "float64") or steps < 1:
        raise DefinitionError(
            f"verify(steps={shown(steps)}, against={shown(against)})",
            hint='one step or more, against "eager" or "float64"',
        )
    with looking_at(graph, args, kwargs, "verify") as subject:
        return _verified(subject, steps, against)


def verify_after(
    graph: Any, before: Sequence[tuple[Any, ...]], args: tuple[Any, ...], **options: Any
) -> VerifyReport:
    """`graph.verify()` of a call that follows others; what these change is put back as well."""
    with looking_at(graph, before[0], {}, "verify"):
        for call in before:
            graph(*call)
        report: VerifyReport = graph.verify(*args, **options)
        return report


def _verified(subject: Subject, steps: int, against: str) -> VerifyReport:
    kept = subject.keep()
    try:
        graph, exact, build = _graph_steps(subject, steps, against)
        kept.restore()
        eager = _eager_steps(subject, graph)
        kept.restore()
        moving = _moving(build.stages[0].program, subject.recapture(build))
        kept.restore()
        compare_by = partial(_compared, eager, graph)
        compared, judged, found = compare_by(exact.truths(_NEARBY))
        wrong, ranks = _anywhere(subject, found)
        if wrong is not None and judged:
            compared, judged, found = compare_by(exact.truths(_MORE_NEARBY))
            wrong, ranks = _anywhere(subject, found)
        if wrong is not None:
            first = _located(subject, wrong, bitwise=_is_bitwise(build))
        else:
            first = _unsteady(subject) if judged else None
    finally:
        kept.restore()
    ok = wrong is None and first is None and not moving
    name = subject.inside.name
    return VerifyReport(
        *(name, build.backend, steps, against, Rows(compared), judged, first, moving, ok, ranks),
        padded=subject.padded,
        made=subject.made,
        idle=tuple(one.name for one in subject.owned.optimizers if _is_idle(one.optimizer)),
    )


def _is_idle(optimizer: Optimizer) -> bool:
    rates = [group.get("lr") for group in optimizer.param_groups]
    return bool(rates) and all(rate is not None and float(rate) == 0 for rate in rates)


def _unsteady(subject: Subject) -> FirstDifference | None:
    """The op that gives something else each time, which would pass for rounding: eager mode is as far from float64."""
    build, bound = subject.prepare()
    return not_repeatable(build, own_inputs(bound))


def _anywhere(subject: Subject, wrong: int | None) -> tuple[int | None, tuple[int, ...]]:
    """The first step that is not as promised in any process, and in which these are; without ranks if there is one."""
    said = subject.said("" if wrong is None else str(wrong))
    found = {rank: int(word) for rank, word in said.items() if word}
    return min(found.values(), default=None), tuple(found) if len(said) > 1 else ()


def _is_bitwise(build: Build) -> bool:
    """False if a pass or a kernel choice is on that may round, or if sums are over so many processes that they may."""
    settings = build.settings
    chosen = settings.is_on(settings.kernel_selection)
    return not settings.is_compiled and keeps_bits(settings) and not chosen and not _adds_many(build)


def _adds_many(build: Build) -> bool:
    """True for sums over more than two processes: in which order a number is added depends on where it is in its bucket."""
    calls = calls_in_order(build.stages[0].program)
    return any({"sum", "avg"} & {*numbers} and group_size(str(numbers[-1])) > 2 for _, numbers in calls)


def _given(call: Call) -> dict[str, Any]:
    return dict(zip(call.paths(), call.leaves, strict=True))


def _graph_steps(subject: Subject, steps: int, against: str) -> tuple[list[After], Exact, Build]:
    """What each step of the graph makes and changes, its float64 values if they are needed, and the first step's build."""
    after: list[After] = []
    exact = Exact()
    builds = []
    for _ in range(steps):
        build, bound = subject.prepare()
        builds.append(build)
        if against == "float64" or not _is_bitwise(builds[0]):
            exact.record(build, bound)
        after.append(after_step(subject.owned, subject.run_graph(), _given(subject.call)))
    return after, exact, builds[0]


def _eager_steps(subject: Subject, graph: Sequence[After]) -> list[After]:
    """What eager mode makes and changes; `graph` is what the graph did."""
    found: list[After] = []
    parts = parts_of_whole(subject.owned, subject.inside.settings)
    for number, beside in enumerate(graph):
        after = after_step(subject.owned, _run_eager(subject, number), _given(subject.call))
        after[OPTIMIZERS] |= first_entries(
            subject.owned, beside[OPTIMIZERS].keys() - after[OPTIMIZERS], parts
        )
        found.append(after)
    return found


def _run_eager(subject: Subject, number: int) -> Any:
    """A step in eager mode. Raises an error of the same kind if only that fails, since the graph has taken the step."""
    try:
        return subject.run_eager()
    except MonographError:
        raise
    except Exception as error:
        where = user_place_of(error)
        raise capture_error_of(error)(
            f"eager mode fails in step {number}, and the graph does not: {first_line(error)}",
            where=where if where.file else None,  # backward() of a graph that has no build() of the user's
            hint="there is nothing to compare with until eager mode runs this step; an op that changes an argument, for example, has "
            "to say so (mutates_args)",
        ) from error


def _compared(
    eager: Sequence[After], graph: Sequence[After], truths: Sequence[Sequence[Truth]]
) -> tuple[list[Compared], dict[str, FloatReport], int | None]:
    """Each tensor of each step, the worst verdict on each kind, and the first step that is not as promised."""
    compared: list[Compared] = []
    judged: dict[str, FloatReport] = {}
    wrong: int | None = None
    for number, (one, other) in enumerate(zip(eager, graph, strict=True)):
        exact = [truth.by_path(list(other[RESULTS])) for truth in truths[number]] if truths else []
        found, verdict = compare(number, one, other, exact)
        compared += found
        judged |= {k: item for k, item in verdict.items() if k not in judged or not item.ok_for_one_step}
        is_one_step = all(report.eager_ok for report in verdict.values())
        if wrong is None and not (is_one_step and is_fine(found, verdict)):
            wrong = number
    return compared, judged, wrong


def _moving(before: Program, again: Program) -> tuple[str, ...]:
    """Ops whose constants are others in another capture of the same step."""
    old, new = list(compute_nodes(before.graph)), list(compute_nodes(again.graph))
    matcher = SequenceMatcher(
        None, [str(n.target) for n in old], [str(n.target) for n in new], autojunk=False
    )
    moved = []
    for first, start, size in matcher.get_matching_blocks():
        for one, other in zip(old[first : first + size], new[start : start + size], strict=True):
            if _constants(one) != _constants(other):
                place = f" at {origin(one)}" if origin(one).file else ""
                moved.append(f"{call_text(one)}{place} was captured again as {call_text(other)}")
    return tuple(moved[:_SHOWN])


def _constants(node: fx.Node) -> str:
    return repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: None))


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
        with EagerLog(subject.owned.named_modules()) as log:
            returned = subject.run_eager()
        after = after_step(subject.owned, returned, _given(subject.call))
        now.restore()
        expected = {path: item for kind in KINDS for path, item in after[kind].items()}
        leaves: list[Any] = []
        tree = flatten(returned, leaves)
        for path, index in zip(
            leaf_paths(tree, "result"), build.executor.bound.output_of_each_result, strict=True
        ):
            if index is not None:
                expected[build.program.outputs[index].path] = after[RESULTS][path]
        rounds = _adds_many(build)
        agrees = same_bits_of if bitwise else near_float64(build, inputs, mutual=rounds)
        captured = agrees if rounds else same_value
        ops = (
            None if build.captured.shares.agreed else log.ops
        )  # a pipeline takes them in the order of its schedule
        return locate(build, inputs, expected, ops, agrees, captured, subject.is_so_anywhere)
    finally:
        kept.restore()
