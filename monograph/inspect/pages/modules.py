"""What `graph.summary()` gives: the modules of a step as a tree, with shapes, parameters, arithmetic and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from monograph.compat.modules import buffers_of, parameters_of
from monograph.compiler import Build
from monograph.inspect.memory.holders import by_module, holders
from monograph.ir.call_text import ModuleCall
from monograph.ir.meta import compute_nodes, origin
from monograph.ir.ops.arithmetic import flops
from monograph.ir.program import Program
from monograph.ir.text import Displayed, Rows, bytes_text, count_text, table
from monograph.state.find import Owned

_COLUMNS: Final = ("module", "output", "parameters", "forward FLOPs", "backward FLOPs", "at the peak")
_WIDEST: Final = 40  # letters of an output
_PHASES: Final = ("forward", "backward")
_NOT_YET: Final = "no build yet: shapes, FLOPs and memory are known after a call, or by summary(*specs)"


@dataclass(frozen=True)
class ModuleRow:
    """A module with all that is inside of it. A parameter that it has at two places is counted once."""

    path: str
    kind: str  # the name of its class
    depth: int
    output: str  # the form of what it returns, "f32[8, 10]"; empty if the step does not call it
    num_parameters: int
    flops: Mapping[str, int] = field(default_factory=dict)  # by phase
    peak_bytes: int = 0  # held for it at the peak of the step: state, gradients, activations


@dataclass(frozen=True, repr=False)
class StepSummary(Displayed):
    """The modules of a step, and its sums. `str()` of it is a table.

    FLOPs are those of matrix products, convolutions and attention in the step as captured, two for each multiplication and
    addition; `flops` has them by phase, of what belongs to no module too. Without a build they are 0, as bytes are.
    """

    graph: str
    modules: tuple[ModuleRow, ...]
    num_parameters: int
    num_trainable: int
    num_buffers: int  # elements
    flops: Mapping[str, int]
    backend: str = ""  # empty without a build
    about: str = ""  # what goes into the step, and what comes out
    state_bytes: int = 0
    argument_bytes: int = 0
    peak_bytes: int = 0  # that the step makes, where it holds most
    depth: int | None = None  # of the rows that the table has

    @property
    def total_flops(self) -> int:
        """Of the whole step."""
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        """All at the peak: state, arguments, and what the step holds."""
        return self.state_bytes + self.argument_bytes + self.peak_bytes

    def __str__(self) -> str:
        return "\n\n".join([self._head(), *filter(None, [self._table()]), self._foot()])

    def _head(self) -> str:
        return (
            f"{self.graph} on {self.backend}: {self.about}" if self.backend else f"{self.graph}: {_NOT_YET}"
        )

    def _table(self) -> str:
        shown = [row for row in self.modules if self.depth is None or row.depth < self.depth]
        rows = [
            (
                f"{'  ' * row.depth}{row.path.rpartition('.')[2] if row.depth else row.path} ({row.kind})",
                row.output,
                f"{row.num_parameters:,}" if row.num_parameters else "",
                *(amount(row.flops.get(phase, 0)) for phase in _PHASES),
                bytes_text(row.peak_bytes) if row.peak_bytes else "",
            )
            for row in shown
        ]
        known = len(_COLUMNS) if self.backend else 3
        left = len(self.modules) - len(shown)
        more = f"\nand {count_text(left, 'module')} inside of them" if left else ""
        return table(_COLUMNS[:known], [row[:known] for row in rows]) + more if rows else ""

    def _foot(self) -> str:
        frozen = self.num_parameters - self.num_trainable
        lines = [f"parameters: {self.num_parameters:,}" + (f", {frozen:,} of them frozen" if frozen else "")]
        lines += [f"elements of buffers: {self.num_buffers:,}"] if self.num_buffers else []
        if not self.backend:
            return "\n".join(lines)
        counted = ", ".join(f"{phase} {amount(count)}" for phase, count in self.flops.items() if count)
        lines.append(f"FLOPs: {amount(self.total_flops)}" + f" ({counted})" * bool(counted))
        lines.append(
            f"memory: {bytes_text(self.total_bytes)} at the peak: {bytes_text(self.state_bytes)} of state, "
            f"{bytes_text(self.argument_bytes)} of arguments, {bytes_text(self.peak_bytes)} that the step makes"
        )
        return "\n".join(lines)


def step_summary(name: str, owned: Owned, build: Build | None, depth: int | None = None) -> StepSummary:
    """Sum up what a graph holds, and what a build makes of it."""
    modules = owned.named_modules()
    calls = build.captured.module_io if build is not None else {}
    arithmetic = {} if build is None else _arithmetic(build.stages[0].program)
    inside = _with_those_inside(arithmetic)
    held = {} if build is None else _held(build)
    rows = Rows(
        ModuleRow(
            path,
            type(module).__name__,
            sum(path.startswith(f"{other}.") for other in _around(path) if other in modules),
            _output(calls.get(path, ())),
            sum(map(_numel, _parameters(module))),
            inside.get(path, {}),
            held.get(path, 0),
        )
        for path, module in modules.items()
    )
    parameters = _distinct(item for module in modules.values() for item in parameters_of(module).values())
    buffers = _distinct(item for module in modules.values() for item in buffers_of(module).values())
    phases: Counter[str] = Counter()
    for (_, phase), count in arithmetic.items():
        phases[phase] += count
    summary = StepSummary(
        name,
        rows,
        num_parameters=sum(map(_numel, parameters)),
        num_trainable=sum(_numel(item) for item in parameters if item.requires_grad),
        num_buffers=sum(map(_numel, buffers)),
        flops=dict(phases),
        depth=depth,
    )
    return summary if build is None else _with_build(summary, build)


def _with_build(summary: StepSummary, build: Build) -> StepSummary:
    calls = build.captured.module_io.get("", ())[:1]
    given = ", ".join(f"{leaf.path} {leaf.value}" for call in calls for leaf in call.inputs)
    made = ", ".join(str(leaf.value) for call in calls for leaf in call.outputs)
    ops = count_text(sum(1 for _ in build.stages[0].program.ops()), "op")
    sizes = [size for call in calls for leaf in call.inputs for size in getattr(leaf.value, "shape", ())]
    varies = "; numbers are those of the sizes of its capture" if set(map(type, sizes)) - {int} else ""
    return replace(
        summary,
        backend=build.backend,
        about=f"{ops} as captured, of {given or 'no tensors'}; it gives {made or 'none'}{varies}",
        state_bytes=build.memory.state_bytes,
        argument_bytes=build.memory.argument_bytes,
        peak_bytes=build.memory.peak_bytes,
    )


def amount(count: int) -> str:
    """A number with three digits or so: 2.36 M; empty for none."""
    size, units = float(count), ["", " K", " M", " G", " T", " P"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return (f"{size:.3g}" + units[0]) if count else ""


def _arithmetic(program: Program) -> Mapping[tuple[str, str], int]:
    """By module and phase. A subgraph counts as often as it is called."""
    calls = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_module")
    found: Counter[tuple[str, str]] = Counter()
    for item in program.programs:
        times = 1 if item is program else calls[item.name]
        for node in compute_nodes(item.graph):
            place = origin(node)
            if count := flops(node):
                found[place.module, place.phase or "step"] += times * count
    return found


def _with_those_inside(arithmetic: Mapping[tuple[str, str], int]) -> Mapping[str, Mapping[str, int]]:
    found: dict[str, Counter[str]] = {}
    for (module, phase), count in arithmetic.items():
        for path in (module, *_around(module)) if count else ():
            found.setdefault(path, Counter())[phase] += count
    return found


def _held(build: Build) -> Mapping[str, int]:
    held = holders(build.compiled_plan or build.plan, build.memory)
    return {module: sum(kinds.values()) for module, kinds in by_module(held).items()}


def _around(path: str) -> Iterator[str]:
    """The paths of what is around a module, the nearest first."""
    while (path := path.rpartition(".")[0]) != "":
        yield path


def _output(calls: Sequence[ModuleCall]) -> str:
    if not calls:
        return ""
    text = ", ".join(str(leaf.value) for leaf in calls[0].outputs)
    text = text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
    return text if len(calls) == 1 else f"{text} ({len(calls)} calls)"


def _parameters(module: nn.Module) -> Sequence[torch.Tensor]:
    return _distinct(item for inner in module.modules() for item in parameters_of(inner).values())


def _distinct(tensors: Iterator[torch.Tensor | None]) -> Sequence[torch.Tensor]:
    return list({id(item): item for item in tensors if item is not None}.values())


def _numel(tensor: torch.Tensor) -> int:
    return 0 if is_lazy(tensor) else tensor.numel()
