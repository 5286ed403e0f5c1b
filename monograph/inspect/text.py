"""The text of a graph: its tree of modules with tags, and why its builds exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monograph.capture.state import Holdings
from monograph.compiler import Build
from monograph.config import GraphConfig


def graph_text(name: str, kind: str, config: GraphConfig, holdings: Holdings, builds: Sequence[Build]) -> str:
    """The tree of a graph."""
    return f"(GRAPH:{name}:{kind}): (\n  (CONFIG:config:{config!r})\n)"


def explain_text(name: str, builds: Sequence[Build]) -> str:
    """Why each build exists."""
    lines = [f"{name}: {len(builds)} build(s)"]
    for build in builds:
        nodes = sum(1 for _ in build.program.graph.nodes)
        lines.append(f"build {build.number} on {build.backend}, {nodes} nodes: {build.reason}")
        for title, items in _sections(build):
            lines += [f"  {title}:", *(f"    {item}" for item in items)]
    return "\n".join(lines)


def _sections(build: Build) -> list[tuple[str, list[Any]]]:
    found = [
        ("guarded facts", build.guards.facts()),
        ("parameters without gradient", list(build.captured.without_gradient)),
        ("constants and notes", list(build.captured.notes)),
    ]
    return [(title, items) for title, items in found if items]
