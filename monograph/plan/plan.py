"""Plan: the program made physical."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from monograph.ir.program import Program
from monograph.plan.lifetime import frees


@dataclass(frozen=True)
class Plan:
    """The order of the program's nodes, for each op the values that are freed after it, and the plans of its parts."""

    program: Program
    frees: Mapping[str, tuple[str, ...]]
    parts: tuple[Plan, ...] = ()


def make_plan(program: Program) -> Plan:
    """Keep the captured order; free each value after its last use."""
    return Plan(program, frees(program.graph), tuple(map(make_plan, program.parts)))
