"""What each build costs, and how much it is used, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from monograph.compiler import Build
from monograph.ir.text import bytes_text, shortened, table

_COLUMNS = ("build", "steps", "capture", "compile", "memory")


def cost_lines(builds: Sequence[Build]) -> list[str]:
    """A line for each build: the steps that it has made, the seconds that making it took, its memory, and its reason.

    Memory is what a step holds at most besides state and arguments, by the plan; of sizes that vary for those of the capture.
    """
    if not builds:
        return []
    lines = table(_COLUMNS, list(map(_row, builds))).splitlines()
    reasons = ["reason", *(shortened(build.reason) for build in builds)]
    return [f"  {line}  {reason}" for line, reason in zip(lines, reasons, strict=True)]


def _row(build: Build) -> tuple[str, ...]:
    captured = build.stages[0].seconds
    compiled = max(build.seconds - captured, 0.0)
    memory = bytes_text(build.memory.peak_bytes)
    return str(build.number), str(build.executor.steps), f"{captured:.2f} s", f"{compiled:.2f} s", memory
