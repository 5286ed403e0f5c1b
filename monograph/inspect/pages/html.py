"""One page that shows a build: modules, program, source, memory, profile and passes. It needs no network."""

from __future__ import annotations

import json
import linecache
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from monograph.compiler import Build
from monograph.errors import DefinitionError
from monograph.inspect.diff import diff_text
from monograph.inspect.memory.chart import phase_of, widths
from monograph.inspect.memory.reading import memory_report
from monograph.inspect.memory.report import MemoryReport
from monograph.inspect.pages.modules import StepSummary, amount
from monograph.inspect.profile import Profile
from monograph.ir.meta import compute_nodes, labels, origin, value
from monograph.ir.printer import call_text
from monograph.ir.program import Program
from monograph.ir.text import bytes_text
from monograph.passes.inductor.inline_parts import inline_parts

_LONGEST_FILE = 20_000  # lines of a source file that are kept


def write_html(
    path: str | Path, summary: StepSummary, build: Build, explained: str, profile: Profile | None = None
) -> None:
    """Write the page. `summary` and `profile` are of this build; without a profile there is none on the page."""
    target = Path(path)
    if target.suffix not in (".html", ".htm"):
        raise DefinitionError(f"to_html({str(path)!r}): a page is an HTML file", hint='to_html("step.html")')
    template = files("monograph.inspect.pages").joinpath("page.html").read_text()
    text = json.dumps(_data(summary, build, explained, profile), separators=(",", ":"))
    safe = text.replace("<", "\\u003c")  # nothing in it may end the script element
    target.write_text(template.replace("@DATA@", safe))


def shown_build(builds: Sequence[Build], profile: Profile | None) -> Build:
    """The newest of some builds, or that which a profile is of. Raises DefinitionError if it is of none."""
    if profile is None:
        return builds[-1]
    timed = [op.name for op in profile.ops]
    for build in builds:
        if build.number == profile.build and timed == [
            node.name for node in compute_nodes(_program(build).graph)
        ]:
            return build
    raise DefinitionError(
        f"the profile is of {profile.graph}, and of no build of this graph",
        hint="to_html(path, profile=graph.profile(*inputs))",
    )


def _program(build: Build) -> Program:
    return inline_parts(build.stages[0].program)


def _data(summary: StepSummary, build: Build, explained: str, profile: Profile | None) -> dict[str, Any]:
    program = _program(build)
    numbers: dict[str, int] = {}
    nodes = []
    for node in compute_nodes(program.graph):
        place = origin(node)
        number = numbers.setdefault(place.file, len(numbers)) if place.file else -1
        nodes.append([
            node.name, call_text(node), _made(value(node)), place.phase, place.module, number, place.line,
            list(labels(node)),
        ])  # fmt: skip
    data: dict[str, object] = {
        "name": summary.graph,
        "about": f"build {build.number} on {build.backend}: {build.reason}; as captured, {len(nodes)} ops",
        "nodes": nodes,
        "files": [{"path": file, "lines": _lines(file)} for file in numbers],
        "summary": _summed_up(summary, profile),
        "memory": _held(memory_report(summary.graph, build)),
        "passes": [[after.name, diff_text(build.stages, after.name)] for _, after in pairwise(build.stages)],
        "explain": explained,
        "profile": None,
    }
    if profile is not None:
        data["profile"] = {
            "about": str(profile).partition("\n")[0],
            "seconds": [op.seconds for op in profile.ops],
            "shares": [op.share for op in profile.ops],
        }
    return data


def _summed_up(summary: StepSummary, profile: Profile | None) -> dict[str, Any]:
    rows = [
        [
            *(row.path, row.kind, row.depth, row.output, row.num_parameters),
            *(row.flops.get(phase, 0) for phase in ("forward", "backward")),
            row.peak_bytes,
        ]
        for row in summary.modules
    ]
    return {"about": summary.about, "tiles": _tiles(summary, profile), "modules": rows}


def _held(memory: MemoryReport) -> dict[str, Any]:
    return {
        "about": str(memory).partition("\n\n")[0],
        "points": [
            [point.op, point.running_bytes, str(point.where), phase_of(point), point.where.module]
            for point in memory.timeline
        ],
        "widths": widths(memory.timeline, memory.total_bytes),
        "held": memory.state_bytes + memory.argument_bytes,
        "kinds": list(memory.by_kind().items()),
        "modules": [
            [module or "build()", sum(kinds.values()), _kinds_text(kinds)]
            for module, kinds in memory.by_module().items()
        ],
    }


def _tiles(summary: StepSummary, profile: Profile | None) -> Sequence[tuple[str, str]]:
    """The few numbers that say how large a step is, each with its name."""
    measured = [("a step", f"{profile.step_seconds * 1e3:.3f} ms")] if profile is not None else []
    return [
        *measured,
        ("parameters", f"{summary.num_parameters:,}"),
        ("FLOPs", amount(summary.total_flops) or "none counted"),
        ("at the peak", bytes_text(summary.total_bytes)),
        ("of which state", bytes_text(summary.state_bytes)),
        ("made by the step", bytes_text(summary.peak_bytes)),
    ]


def _lines(file: str) -> Sequence[str]:
    return [line.rstrip("\n") for line in linecache.getlines(file)[:_LONGEST_FILE]]


def _made(described: Any) -> str:
    if isinstance(described, tuple):
        return f"({', '.join(map(_made, described))})"
    return str(described or "")


def _kinds_text(kinds: Mapping[str, int]) -> str:
    """What a module holds, the most first."""
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {bytes_text(nbytes)}" for kind, nbytes in ordered)
