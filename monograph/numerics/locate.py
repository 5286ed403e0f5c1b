"""Where two runs of one step part: the capture, a pass or the kernels, and the first op that is to blame.

Each suspect is acquitted by its results: the captured program op by op against eager mode, the program after each pass
against the captured one (by bisection), the compiled step against the program that it was made from.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates
from monograph.compat.ops import is_custom
from monograph.compiler import Build
from monograph.inspect.kernel_values import kernel_values, run_kernels
from monograph.inspect.summary import Summary, summary
from monograph.inspect.walk import Walk, is_defined
from monograph.ir.call.nested import tensors_in
from monograph.ir.memory import changed_by
from monograph.ir.meta import labels, origin, output_nodes
from monograph.ir.printer import call_text
from monograph.ir.program import Program
from monograph.ir.text import Displayed
from monograph.numerics.eager_log import EagerOp, op_name, says_nothing
from monograph.numerics.judge import same_bits
from monograph.numerics.repro import Evidence, expression
from monograph.passes.run import Stage
from monograph.user_code.lines import Origin

CAPTURE, KERNELS = "capture", "kernels of"  # causes; a backend follows
NOT_REPEATABLE = "the op itself, which is not repeatable: run twice on the same inputs, from the same random state, it gives two results"
SILENT_WRITE = "the op itself, which changes its argument and does not say so: name it in mutates_args"
Agrees = Callable[[str, Any, Any], bool]  # name of a value of the captured program, expected, got


@dataclass(frozen=True, slots=True, repr=False)
class FirstDifference(Displayed, Origin):
    """The first op whose numbers are wrong: its place in the user's code, and who made them wrong."""

    op: str = ""  # as it stands in the text of the program
    cause: str = ""  # "capture", the name of a pass, "kernels of inductor", or the op itself
    reaches: str = ""  # the result or state by which it was noticed
    expected: str = ""
    got: str = ""
    evidence: Evidence | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        place = Origin.__str__(self)
        lines = [f"{self.op or self.reaches} at {place}" if place else self.op or self.reaches]
        lines.append(f"  by {self.cause}; it reaches {self.reaches}")
        if self.expected:
            lines += [f"  expected {self.expected}", f"  got      {self.got}"]
        return "\n".join(lines)


def locate(
    build: Build,
    inputs: Sequence[Any],
    expected: Mapping[str, Any],
    log: Sequence[EagerOp] | None,
    agrees: Agrees,
    captured_agrees: Agrees,
    anywhere: Callable[[bool], bool],
) -> FirstDifference | None:
    """Who parts first from what eager mode gave; None if that is nobody in this process.

    `expected` has eager's values by the paths of the outputs, `log` its ops, None if their order is another one. `agrees` judges what may round, `captured_agrees` what the
    captured program gives; `inputs` are a copy of what the step was given. Of processes that run it together all go the
    same way: `anywhere` is true if a process finds so.
    """
    stages = list(build.stages)
    captured = Walk(stages[0].program, inputs)
    outputs = _by_path(captured.program, captured.run())
    silent = _silent_write(captured)
    if anywhere(silent is not None):
        return silent
    path = _first_unequal(expected, outputs, captured_agrees)
    if anywhere(path is not None):
        if path is None:
            return None
        if log is None:
            return _by_output(captured.program, path, CAPTURE, expected[path], outputs[path])
        return _in_capture(captured, log, path, expected)
    bad = _first_bad_stage(stages, inputs, outputs, agrees, anywhere)
    if bad is not None:
        index, path = bad
        return _in_pass(stages[index - 1], stages[index], inputs, path, agrees)
    return _in_kernels(build, inputs, agrees, anywhere)


def same_value(_name: str, expected: Any, got: Any) -> bool:
    """Judges a value of the captured program, which runs op by op as eager mode does."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        return same_bits(expected, got)
    return repr(expected) == repr(got)


def _by_path(program: Program, outputs: Sequence[Any]) -> dict[str, Any]:
    return dict(zip((port.path for port in program.outputs), outputs, strict=True))


def _first_unequal(expected: Mapping[str, Any], got: Mapping[str, Any], agrees: Agrees) -> str | None:
    return next(
        (path for path, item in got.items() if path in expected and not agrees(path, expected[path], item)),
        None,
    )


# --- the capture -----------------------------------------------------------------------------------------------------


def _in_capture(
    walk: Walk, log: Sequence[EagerOp], path: str, expected: Mapping[str, Any]
) -> FirstDifference:
    """The first op of the program that gave other numbers than its counterpart in eager mode, or has none.

    An op without a counterpart is to blame only if numbers differ after it: some are written otherwise and do the same.
    """
    nodes = [
        node for node in walk.nodes if op_name(node.target) is not None and not says_nothing(node.target)
    ]
    mine = [op_name(node.target) for node in nodes]
    matcher = difflib.SequenceMatcher(None, mine, [op.name for op in log], autojunk=False)
    unmatched: FirstDifference | None = None
    for tag, first, last, start, end in matcher.get_opcodes():
        if tag != "equal":
            near = nodes[min(first, len(nodes) - 1)]
            if end > start:
                wanted = f"eager mode runs {', '.join(op.name for op in log[start:end])} here"
                unmatched = _difference(near, CAPTURE, path, wanted, call_text(near), where=log[start].where)
            else:
                unmatched = _difference(near, CAPTURE, path, "eager mode does not run it", call_text(near))
            continue
        for node, op in zip(nodes[first:last], log[start:end], strict=True):
            made = tensors_in(walk.values[node])
            if is_defined(node) and not all(map(same_bits, op.made, made)):
                if unmatched is not None:
                    return unmatched
                evidence = Evidence(None, expression(walk, node), op.made[0], made[0])
                return _difference(
                    node, _blamed(CAPTURE, walk, node), path, summary(op.made[0]), summary(made[0]), evidence
                )
            if made:
                unmatched = None
    return unmatched or _by_output(walk.program, path, CAPTURE, expected.get(path), None)


# --- passes ----------------------------------------------------------------------------------------------------------


def _first_bad_stage(
    stages: Sequence[Stage],
    inputs: Sequence[Any],
    expected: Mapping[str, Any],
    agrees: Agrees,
    anywhere: Callable[[bool], bool],
) -> tuple[int, str | None] | None:
    """The first stage whose results are wrong, found by halving, and a result of this process that shows it."""
    wrong: dict[int, tuple[bool, str | None]] = {0: (False, None)}

    def verdict(index: int) -> tuple[bool, str | None]:
        program = stages[index].program
        if index and program is stages[index - 1].program:
            return verdict(index - 1)
        if index not in wrong:
            walk = Walk(program, inputs, keep=False)
            path = _first_unequal(expected, _by_path(walk.program, walk.run()), agrees)
            wrong[index] = anywhere(path is not None), path
        return wrong[index]

    good, bad = 0, len(stages) - 1
    if not verdict(bad)[0]:
        return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if verdict(middle)[0] else (middle, bad)
    return bad, verdict(bad)[1]


def _in_pass(
    before: Stage, after: Stage, inputs: Sequence[Any], path: str | None, agrees: Agrees
) -> FirstDifference | None:
    """The first op after a pass whose value is not that of the op of the same name before it."""
    known, walk = Walk(before.program, inputs), Walk(after.program, inputs)
    known.run()
    walk.run()
    if path is None:
        return None
    expected = {node.name: item for node, item in known.values.items()}
    cause = f"pass {after.name}"
    for node in walk.nodes:
        made = walk.values[node]
        if node.name not in expected or not is_defined(node) or agrees(node.name, expected[node.name], made):
            continue
        fresh = [item for item in node.all_input_nodes if item.name not in expected and origin(item).file]
        blamed = fresh[-1] if fresh else node
        right = next(item for item in known.nodes if item.name == node.name)
        evidence = Evidence(expression(known, right), expression(walk, blamed), expected[node.name], made)
        cause = _blamed(cause, walk, blamed)
        return _difference(blamed, cause, path, summary(expected[node.name]), summary(made), evidence)
    return _by_output(
        known.program, path, cause, _by_path(known.program, known.outputs()).get(path),
        _by_path(walk.program, walk.outputs()).get(path),
    )  # fmt: skip


# --- kernels ---------------------------------------------------------------------------------------------------------


def _in_kernels(
    build: Build, inputs: Sequence[Any], agrees: Agrees, anywhere: Callable[[bool], bool]
) -> FirstDifference | None:
    """The first value that compiled code gives otherwise than the same ops one by one."""
    program = build.plan.program
    walk = Walk(program, inputs)
    right = walk.run()
    cause = f"{KERNELS} {build.backend}"
    got = _by_path(program, run_kernels(build, inputs))
    path = _first_unequal(_by_path(program, right), got, agrees)
    if not anywhere(path is not None):
        return None
    values = kernel_values(build, walk.program, inputs)  # in all processes
    if path is None:
        return None
    for node, made in values:
        if is_defined(node) and not agrees(node.name, walk.values[node], made):
            expected = walk.values[node]
            evidence = Evidence(expression(walk, node), None, expected, made)
            cause = _blamed(cause, walk, node)
            return _difference(node, cause, path, summary(expected), summary(made), evidence)
    return _by_output(walk.program, path, f"{cause}, only when fused", None, got[path])


# --- ops that are not repeatable -------------------------------------------------------------------------------------


def not_repeatable(build: Build, inputs: Sequence[Any]) -> FirstDifference | None:
    """The first op that torch does not know and that differs from itself, where rounding would hide what it does."""
    walk = Walk(build.stages[0].program, inputs)
    custom = [node for node in walk.nodes if is_custom(node.target)]
    if not custom:
        return None
    walk.run()
    for node in custom:
        if (twice := _unlike(walk, node)) is not None:
            one, other = map(summary, twice)
            return _difference(node, NOT_REPEATABLE, node.name, one, other)
    return None


def _silent_write(walk: Walk) -> FirstDifference | None:
    """The first op of the user's, in a program that has run, that changes an argument and does not say so."""
    for node in walk.nodes:
        if not is_custom(node.target) or communicates(node.target) or not is_defined(node):
            continue
        left, said = walk.left_by(node), changed_by(node)
        for item, before in walk.operands(node):
            if item not in said and not same_value(item.name, before, left[item]):
                return _difference(node, SILENT_WRITE, item.name, summary(before), summary(left[item]))
    return None


def _blamed(cause: str, walk: Walk, node: fx.Node) -> str:
    """The cause of a difference at an op that a walk has run; the op itself if it differs from itself."""
    return cause if _unlike(walk, node) is None else NOT_REPEATABLE


def _unlike(walk: Walk, node: fx.Node) -> tuple[Any, Any] | None:
    """What an op gives when it runs twice, if that differs. Collectives do not run again: other processes would wait."""
    if node.op != "call_function" or communicates(node.target) or not is_defined(node):
        return None
    one, other = (walk.once_more(node) for _ in range(2))
    return None if all(map(same_bits, tensors_in(one), tensors_in(other))) else (one, other)


# --- in words --------------------------------------------------------------------------------------------------------


def _by_output(program: Program, path: str, cause: str, expected: Any, got: Any) -> FirstDifference:
    """No op is to blame, but what is given out: the op that makes the value there."""
    ports = [port.path for port in program.outputs]
    node = output_nodes(program.graph)[ports.index(path)]
    wanted = "" if expected is None else str(summary(expected))
    seen = "" if got is None else str(summary(got))
    if isinstance(node, fx.Node):
        return _difference(node, cause, path, wanted, seen)
    return FirstDifference(cause=cause, reaches=path, expected=wanted, got=seen)


def _difference(
    node: fx.Node,
    cause: str,
    path: str,
    expected: Summary | str,
    got: Summary | str,
    evidence: Evidence | None = None,
    where: Origin | None = None,
) -> FirstDifference:
    own = origin(node)
    place = where if where is not None and where.file else own
    op = node.name if node.op == "placeholder" else f"{node.name} = {call_text(node)}"
    known_as = f"  # {', '.join(labels(node))}" if labels(node) else ""
    return FirstDifference(
        file=place.file,
        line=place.line,
        module=place.module or own.module,
        phase=place.phase or own.phase,
        op=op + known_as,
        cause=cause,
        reaches=path,
        expected=str(expected),
        got=str(got),
        evidence=evidence,
    )
