"""Where a NaN or an infinity comes from: the first op that makes one which reaches a result or the new state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from monograph.compiler import Build
from monograph.inspect.kernel_values import kernel_values, run_kernels
from monograph.inspect.nonfinite_report import Named, Nonfinite, NonfiniteReport
from monograph.inspect.summary import Summary, summary
from monograph.inspect.walk import Walk, is_defined
from monograph.ir.meta import labels, origin, output_nodes
from monograph.ir.port import Role
from monograph.ir.printer import call_text
from monograph.ir.program import Program
from monograph.passes.gate_nonfinite import is_loss


def find_nonfinite(graph: str, walk: Walk) -> NonfiniteReport:
    """Which outputs of a step are not finite, and the first op to blame. `walk` has not begun.

    An infinity that the step writes on purpose, such as that of a mask, is none, unless a loss or new state has it.
    """
    search = _Search(walk)
    walk.run(search.see)
    ends = search.bad_ends()
    guilty = search.guilty(list(ends.values()))
    return NonfiniteReport(graph, tuple(ends), None if guilty is None else search.described(guilty))


def nonfinite_report(graph: str, build: Build, inputs: Sequence[Any]) -> NonfiniteReport:
    """The same of the step of a build, op by op; if all is finite there, of its kernels.

    Kernels of a step that other ranks take a part in do not run once more: all is finite on some of them only.
    """
    report = find_nonfinite(graph, Walk(build.stages[0].program, inputs, keep=False))
    if build.communicates:
        return replace(report, is_of_rank=True)
    return _only_in_kernels(graph, build, inputs) if report.ok else report


def nan_in_backward(build: Build, inputs: Sequence[Any]) -> Nonfinite | None:
    """The first op of backward that makes a NaN, whether or not it reaches anything."""
    walk = Walk(build.stages[0].program, inputs, keep=False)
    search, found = _Search(walk), list[Nonfinite]()

    def see(node: fx.Node, made: Any) -> None:
        search.see(node, made)
        if not found and origin(node).phase == "backward" and search.made_nan(node):
            found.append(search.described(node))

    walk.run(see)
    return found[0] if found else None


def _only_in_kernels(graph: str, build: Build, inputs: Sequence[Any]) -> NonfiniteReport:
    """What the kernels of a build give that is not finite, where the step op by op is; and the first such op."""
    ports, got = build.plan.program.outputs, run_kernels(build, inputs)
    bad = {
        number
        for number, (port, item) in enumerate(zip(ports, got, strict=True))
        if port.role is not Role.PROBE and not summary(item).is_finite
    }
    if not bad:
        return NonfiniteReport(graph, (), None)
    walk = Walk(build.plan.program, inputs)
    search = _Search(walk)
    own = walk.run(search.see)
    reached = tuple(ports[number].path for number in sorted(bad) if summary(own[number]).is_finite)
    for node, made in kernel_values(build, walk.program, inputs) if reached else ():
        if search.is_finite(node) and not (seen := summary(made)).is_finite:
            return NonfiniteReport(graph, reached, search.described(node, seen), build.backend)
    return NonfiniteReport(graph, reached, None, build.backend if reached else "")


class _Search:
    """Ranges of all values of a walk, and which of them are not finite without being meant so."""

    def __init__(self, walk: Walk) -> None:
        self._program = walk.program
        self._ranges = {node: summary(item) for node, item in walk.values.items()}
        self._bad = {node: None for node, found in self._ranges.items() if found.num_nan}  # in order

    def see(self, node: fx.Node, made: Any) -> None:
        """Take note of what an op made."""
        found = self._ranges[node] = summary(made)
        operands = node.all_input_nodes
        meant = (
            any(isinstance(item, float) and math.isinf(item) for item in _constants(node))
            or any(self._ranges[item].num_inf for item in operands)
        ) and not any(self.is_bad(item) for item in operands)
        if is_defined(node) and (found.num_nan or (found.num_inf and not meant)):
            self._bad[node] = None

    def is_bad(self, node: fx.Node) -> bool:
        """True if a value holds a NaN, or an infinity that nobody wrote there."""
        return node in self._bad

    def made_nan(self, node: fx.Node) -> bool:
        """True if a value that was written holds a NaN."""
        return is_defined(node) and self._ranges[node].num_nan > 0

    def is_finite(self, node: fx.Node) -> bool:
        """True if a value holds neither NaN nor Inf."""
        return self._ranges[node].is_finite

    def bad_ends(self) -> dict[str, fx.Node]:
        """The results and the new state that are not finite, by path."""
        before = {port.path: node for port, node in zip(self._program.inputs, self._inputs(), strict=True)}
        found = {}
        for port, node in zip(self._program.outputs, output_nodes(self._program.graph), strict=True):
            if not isinstance(node, fx.Node) or port.role is Role.PROBE:
                continue
            old = before.get(port.path)
            counts = port.role is Role.STATE or is_loss(node)
            new_inf = self._ranges[node].num_inf > (self._ranges[old].num_inf if old is not None else 0)
            if self.is_bad(node) or (counts and new_inf):
                found[port.path] = node
        return found

    def guilty(self, ends: Sequence[fx.Node]) -> fx.Node | None:
        """The first value that reaches one of the ends, is not finite, and depends on none that is not.

        Infinities that are meant so lead there only if nothing else does.
        """
        return self._start(ends, self.is_bad) or self._start(ends, lambda node: not self.is_finite(node))

    def _start(self, ends: Sequence[fx.Node], is_wrong: Callable[[fx.Node], bool]) -> fx.Node | None:
        reaching, pending = set[fx.Node](), [node for node in ends if is_wrong(node)]
        while pending:
            node = pending.pop()
            if node not in reaching:
                reaching.add(node)
                pending += [item for item in node.all_input_nodes if is_wrong(item)]
        nodes: list[fx.Node] = list(self._program.graph.nodes)
        starts = (node for node in nodes if node in reaching and not any(map(is_wrong, node.all_input_nodes)))
        return next(starts, None)

    def _inputs(self) -> list[fx.Node]:
        return list(self._program.graph.find_nodes(op="placeholder"))

    def described(self, node: fx.Node, made: Summary | None = None) -> Nonfinite:
        """The op in words; `made` is what it made elsewhere than in the walk."""
        made = made or self._ranges[node]
        kind = "NaN" if made.num_nan else "Inf"
        operands = tuple(self._named(item) for item in node.all_input_nodes)
        op = "" if node.op == "placeholder" else call_text(node)
        roles = {port.name: port.role for port in self._program.inputs}
        is_state = roles.get(node.name) in (Role.PARAM, Role.BUFFER, Role.STATE)
        return Nonfinite(
            origin(node),
            kind,
            op,
            Named(name_of(node, self._program), made),
            operands,
            is_state,
            tuple(map(self._named, self._infinite_inputs(node))),
        )

    def _infinite_inputs(self, node: fx.Node) -> list[fx.Node]:
        """The inputs from which infinities come to the operands of an op."""
        found, pending = dict[fx.Node, None](), list(node.all_input_nodes)
        while pending:
            item = pending.pop()
            if item not in found and self._ranges[item].num_inf:
                found[item] = None
                pending += item.all_input_nodes
        return [item for item in self._inputs() if item in found]

    def _named(self, node: fx.Node) -> Named:
        return Named(name_of(node, self._program), self._ranges[node])


def name_of(node: fx.Node, program: Program) -> str:
    """What the user knows a value as: the path of an input, what a module returned, or its name in the program."""
    if node.op == "placeholder":
        return program.input_paths.get(node.name, node.name)
    return f"{node.name} ({', '.join(labels(node))})" if labels(node) else node.name


def _constants(node: fx.Node) -> Iterator[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), found.append)
    return (item for item in found if not isinstance(item, fx.Node))
