"""Where a NaN or an infinity comes from: the first op that makes one which reaches a result or the new state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import fx

from monograph.compiler import Build
from monograph.inspect.kernel_values import kernel_values, run_kernels
from monograph.inspect.nonfinite_report import Named, Nonfinite, NonfiniteReport, place_text
from monograph.inspect.summary import Summary, summary
from monograph.inspect.walk import Walk, is_defined
from monograph.ir.meta import UPDATE_PHASE, labels, needed_by, origin, output_nodes
from monograph.ir.ops.overflow import Exit, Span, divisor, exit_of, is_floating, nan_of_infinities, remedy
from monograph.ir.port import Role
from monograph.ir.printer import call_text
from monograph.ir.program import Program
from monograph.passes.gate_nonfinite import is_loss

_GIVEN_NAN: Final = "it is given NaN as a number of Python, such as a learning rate"
_LARGE: Final = 1e4  # parameters that training keeps in order are far below


def find_nonfinite(graph: str, walk: Walk) -> NonfiniteReport:
    """Which outputs of a step are not finite, and the first op to blame. `walk` has not begun.

    An infinity that the step writes on purpose, such as that of a mask, is none, unless a loss or new state has it.
    """
    search = _Search(walk)
    walk.run(search.see)
    ends = search.bad_ends
    bad = list(ends.values())
    guilty = search.guilty(bad)
    if guilty is None:
        return NonfiniteReport(graph, (), None, meant=search.meant_ends(), inside=search.inside())
    nan = None if search.made_nan(guilty) else search.first_nan(bad)
    return NonfiniteReport(
        graph,
        tuple(ends),
        search.described(guilty),
        nan=None if nan is None else search.described(nan, but=guilty),
        state=tuple(path for path in ends if path in search.new_state),
        spared=search.spared(),
        hint="; for the NaN: ".join(filter(None, map(search.hint, filter(None, (guilty, nan))))),
    )


def nonfinite_report(graph: str, build: Build, inputs: Sequence[Any]) -> NonfiniteReport:
    """The same of the step of a build, op by op; if all is finite there, of its kernels.

    Kernels of a step that other ranks take a part in do not run once more: all is finite on some of them only.
    """
    report = find_nonfinite(graph, Walk(build.stages[0].program, inputs, keep=False))
    if build.communicates:
        return replace(report, is_of_rank=True)
    if report.found is not None and report.found.reason == _GIVEN_NAN:
        given = [text for text in build.guards.texts() if text.endswith(" = nan")]
        report = replace(report, hint=f"{', '.join(given)}: look at what sets it" if given else report.hint)
    return (_only_in_kernels(graph, build, inputs) or report) if report.ok else report


def nan_in_backward(build: Build, inputs: Sequence[Any]) -> Nonfinite | None:
    """The first op of backward that makes a NaN, whether or not it reaches anything."""
    walk = Walk(build.stages[0].program, inputs, keep=False)
    search, found = _Search(walk), list[fx.Node]()

    def see(node: fx.Node, made: Any) -> None:
        search.see(node, made)
        if not found and origin(node).phase == "backward" and search.made_nan(node):
            found.append(node)

    walk.run(see)
    return search.described(found[0]) if found else None


def _only_in_kernels(graph: str, build: Build, inputs: Sequence[Any]) -> NonfiniteReport | None:
    """What the kernels of a build make that is not finite, and the first such op.

    None if nothing is; what the step op by op makes too does not count.
    """
    ports, got = build.plan.program.outputs, run_kernels(build, inputs)
    bad = {
        number
        for number, (port, item) in enumerate(zip(ports, got, strict=True))
        if port.role is not Role.PROBE and not summary(item).is_finite
    }
    if not bad:
        return None
    walk = Walk(build.plan.program, inputs)
    search = _Search(walk)
    own = walk.run(search.see)
    made_here = [ports[number] for number in sorted(bad) if summary(own[number]).is_finite]
    if not made_here:
        return None
    reached = tuple(port.path for port in made_here)
    kernels = ((node, summary(made)) for node, made in kernel_values(build, walk.program, inputs))
    first = next(
        ((node, seen) for node, seen in kernels if search.is_finite(node) and not seen.is_finite), None
    )
    return NonfiniteReport(
        graph,
        reached,
        None if first is None else search.described(*first),
        build.backend,
        state=tuple(port.path for port in made_here if port.role is Role.STATE),
    )


_Test = Callable[[fx.Node], bool]


class _Search:
    """Ranges of all values of a walk, and which of them are not finite without being meant so."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._program = walk.program
        outputs = zip(self._program.outputs, output_nodes(self._program.graph), strict=True)
        self._ends = [
            (port, node)
            for port, node in outputs
            if isinstance(node, fx.Node) and port.role is not Role.PROBE
        ]
        self.new_state = {port.path for port, _ in self._ends if port.role is Role.STATE}
        self._exits = dict[fx.Node, Exit]()  # why a value is not finite though its operands are
        self._ranges = {node: summary(item) for node, item in walk.values.items()}
        self._bad = {node: None for node, found in self._ranges.items() if found.num_nan}  # in order

    def see(self, node: fx.Node, made: Any) -> None:
        """Take note of what an op made."""
        found = self._ranges[node] = summary(made)
        operands = node.all_input_nodes
        meant = (_writes_infinity(node) or any(self._ranges[item].num_inf for item in operands)) and not any(
            self.is_bad(item) for item in operands
        )
        if is_defined(node) and (found.num_nan or (found.num_inf and not meant)):
            self._bad[node] = None
        if not found.is_finite and all(map(self.is_finite, operands)):
            self._note_exit(node)

    def _note_exit(self, node: fx.Node) -> None:
        """Ask now: a walk lets go of operands."""
        below = divisor(node)
        spans = {
            item: Span(
                found.low, found.high, _nearest_to_zero(self._walk.values[item]) if item is below else None
            )
            for item in node.all_input_nodes
            if (found := self._ranges[item]).low is not None and found.high is not None
        }
        if (found_exit := exit_of(node, spans)) is not None:
            self._exits[node] = found_exit

    def is_bad(self, node: fx.Node) -> bool:
        """True if a value holds a NaN, or an infinity that nobody wrote there."""
        return node in self._bad

    def made_nan(self, node: fx.Node) -> bool:
        """True if a value that was written holds a NaN."""
        return is_defined(node) and self._ranges[node].num_nan > 0

    def is_finite(self, node: fx.Node) -> bool:
        """True if a value holds neither NaN nor Inf."""
        return self._ranges[node].is_finite

    @cached_property
    def bad_ends(self) -> dict[str, fx.Node]:
        """The results and the new state that are not finite, by path."""
        before = {port.path: node for port, node in zip(self._program.inputs, self._inputs(), strict=True)}
        found = {}
        for port, node in self._ends:
            old = before.get(port.path)
            counts = port.role is Role.STATE or is_loss(node)
            new_inf = self._ranges[node].num_inf > (self._ranges[old].num_inf if old is not None else 0)
            if self.is_bad(node) or (counts and new_inf):
                found[port.path] = node
        return found

    def meant_ends(self) -> tuple[str, ...]:
        """The results and the state of a step that is ok which hold infinities all the same."""
        return tuple(port.path for port, node in self._ends if not self.is_finite(node))

    def spared(self) -> str:
        """What stays finite, in words: all results, or all new state; nothing where there are none."""
        for text, role in (("the results stay", Role.USER), ("the new state stays", Role.STATE)):
            nodes = [node for port, node in self._ends if port.role is role]
            if any(map(is_floating, nodes)) and all(map(self.is_finite, nodes)):
                return text
        return ""

    def inside(self) -> tuple[Nonfinite, ...]:
        """The ops whose NaN or infinity reaches no result and no new state.

        Those that the code writes itself come last.
        """
        reaching = self._reaching([node for _, node in self._ends], self._is_not_finite)
        found = [
            node
            for node in self._walk.nodes
            if is_defined(node) and node not in reaching and self._is_start(node, self._is_not_finite)
        ]
        return tuple(map(self.described, sorted(found, key=_writes_infinity)))

    def hint(self, node: fx.Node) -> str:
        """What to do: against an update or parameters that have become large, or what to write for the op."""
        if (found := self._exits.get(node)) is None or not found.is_overflow:
            return remedy(node, found, made_nan=self.made_nan(node))
        if origin(node).phase == UPDATE_PHASE:
            return "the update overflows: clip the gradients, or lower the learning rate"
        needed, sizes = needed_by([node]), dict[str, float]()
        for port, item in zip(self._program.inputs, self._inputs(), strict=True):
            seen = self._ranges[item]
            if port.role is Role.PARAM and item in needed and seen.low is not None and seen.high is not None:
                sizes[port.path] = max(-seen.low, seen.high)
        path = max(sizes, key=lambda path: sizes[path], default="")
        if not path or sizes[path] < _LARGE:
            return remedy(node, found, made_nan=False)
        return (
            f"{path} reaches {sizes[path]:.3g} before the step: if it has grown in training, "
            "lower the learning rate or clip the gradients"
        )

    def guilty(self, ends: Sequence[fx.Node]) -> fx.Node | None:
        """The first value that reaches one of the ends, is not finite, and depends on none that is not.

        Infinities that are meant so lead there only if nothing else does.
        """
        return self._start(ends, self.is_bad) or self._start(ends, self._is_not_finite)

    def first_nan(self, ends: Sequence[fx.Node]) -> fx.Node | None:
        """The first value with a NaN that reaches one of the ends, and depends on none with one."""
        return self._start(ends, self.made_nan)

    def _start(self, ends: Sequence[fx.Node], is_wrong: _Test) -> fx.Node | None:
        reaching = self._reaching(ends, is_wrong)
        nodes: list[fx.Node] = list(self._program.graph.nodes)
        return next((node for node in nodes if node in reaching and self._is_start(node, is_wrong)), None)

    def _reaching(self, ends: Sequence[fx.Node], is_wrong: _Test) -> set[fx.Node]:
        """The wrong values that reach an end by wrong values alone."""
        found, pending = set[fx.Node](), [node for node in ends if is_wrong(node)]
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += [item for item in node.all_input_nodes if is_wrong(item)]
        return found

    def _is_start(self, node: fx.Node, is_wrong: _Test) -> bool:
        return is_wrong(node) and not any(map(is_wrong, node.all_input_nodes))

    def _is_not_finite(self, node: fx.Node) -> bool:
        return not self.is_finite(node)

    def _has_infinity(self, node: fx.Node) -> bool:
        return self._ranges[node].num_inf > 0

    def _inputs(self) -> list[fx.Node]:
        return list(self._program.graph.find_nodes(op="placeholder"))

    def described(
        self, node: fx.Node, made: Summary | None = None, *, but: fx.Node | None = None
    ) -> Nonfinite:
        """The op in words; `made` is what it made elsewhere than in the walk, `but` is described already."""
        roles = {port.name: port.role for port in self._program.inputs}
        infinite = self._reaching(node.all_input_nodes, self._has_infinity)
        written = [
            item for item in self._walk.nodes if item in infinite and self._is_start(item, self._has_infinity)
        ]
        found = self._exits.get(node) if made is None else None
        made = made or self._ranges[node]
        return Nonfinite(
            origin(node),
            "NaN" if made.num_nan else "Inf",
            _text(node),
            Named(name_of(node, self._program), made),
            tuple(map(self._named, node.all_input_nodes)),
            roles.get(node.name) in (Role.PARAM, Role.BUFFER, Role.STATE),
            tuple(self._named(item) for item in self._inputs() if item in infinite),
            tuple(place_text(call_text(item), origin(item)) for item in written if item is not but),
            _of_its_number(node) or (self._of_infinities(node, made) if found is None else found.text),
            self._reached_from(node),
        )

    def _of_infinities(self, node: fx.Node, made: Summary) -> str:
        operands = [self._ranges[item] for item in node.all_input_nodes]
        is_known = made.num_nan and any(item.num_inf for item in operands)
        return nan_of_infinities(node) if is_known and not any(item.num_nan for item in operands) else ""

    def _reached_from(self, node: fx.Node) -> tuple[str, ...]:
        found, pending = set[fx.Node](), [node]
        while pending:
            item = pending.pop()
            if item not in found and item.op != "output" and self._is_not_finite(item):
                found.add(item)
                pending += item.users
        return tuple(path for path, item in self.bad_ends.items() if item in found)

    def _named(self, node: fx.Node) -> Named:
        return Named(name_of(node, self._program), self._ranges[node])


def name_of(node: fx.Node, program: Program) -> str:
    """What the user knows a value as: the path of an input, what a module returned, or its name in the program."""
    if node.op == "placeholder":
        return program.input_paths.get(node.name, node.name)
    return f"{node.name} ({', '.join(labels(node))})" if labels(node) else node.name


def _numbers_of(node: fx.Node) -> list[float]:
    """The numbers that the code gives an op itself."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), found.append)
    return [item for item in found if isinstance(item, float)]


def _of_its_number(node: fx.Node) -> str:
    return _GIVEN_NAN if any(map(math.isnan, _numbers_of(node))) else ""


def _writes_infinity(node: fx.Node) -> bool:
    """True for an op that the code gives an infinity as a number, as it does for a mask."""
    return any(map(math.isinf, _numbers_of(node)))


def _text(node: fx.Node) -> str:
    return "" if node.op == "placeholder" else call_text(node)


def _nearest_to_zero(item: Any) -> float | None:
    found = item if isinstance(item, torch.Tensor) else torch.tensor(item)
    return float(found.double().abs().min()) if found.numel() and not found.is_complex() else None
