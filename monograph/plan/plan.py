"""Plan: the program made physical."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from monograph.ir.program import Program
from monograph.plan.alias import Aliases, aliases
from monograph.plan.in_place import InPlace, in_place
from monograph.plan.lifetime import frees
from monograph.plan.memory import MemoryPlan, plan_memory
from monograph.plan.overwrite import overwrites


@dataclass(frozen=True)
class Plan:
    """The order of the program's nodes, the values that are freed after each op, and the bytes that are held.

    `in_place` says by position which outputs may be written into the input they replace, and from when on. It holds
    as long as no inputs share memory. The subgraphs of a program write nothing of its inputs. `into` has by name the ops that write over a
    value, and that; the outputs at the positions `written` are then in the state that they replace.
    """

    program: Program
    frees: Mapping[str, tuple[str, ...]]
    parts: tuple[Plan, ...]
    memory: MemoryPlan
    in_place: Mapping[int, InPlace] = field(default_factory=dict)
    into: Mapping[str, str] = field(default_factory=dict)
    written: frozenset[int] = frozenset()
    limit: int | None = None  # bytes that what runs may hold at most

    @cached_property
    def aliases(self) -> Aliases:
        """Which values share memory."""
        return aliases(self.program, self.into)

    def __repr__(self) -> str:
        return f"<Plan of {self.program!r}: {self.memory.peak_bytes:,} bytes at most>"


def make_plan(program: Program) -> Plan:
    """Keep the captured order, and free each value after its last use."""
    parts = tuple(map(_part_plan, program.parts))
    memory = aliases(program)
    dead = frees(program.graph)
    inside = {part.program.name: part.memory for part in parts}
    plan = Plan(
        program,
        dead,
        parts,
        plan_memory(program, dead, memory, inside),
        in_place(program, memory),
    )
    vars(plan)["aliases"] = memory  # known already
    return plan


def over_arguments(plan: Plan) -> Plan:
    """The plan with results that are written over arguments, where nothing reads these any more."""
    over = overwrites(plan.program.graph, plan.aliases, apart=())
    if not over:
        return plan
    into = {op.name: item.name for op, item in over.items()}
    memory = aliases(plan.program, into)
    inside = {part.program.name: part.memory for part in plan.parts}
    made = replace(plan, memory=plan_memory(plan.program, plan.frees, memory, inside), into=into)
    vars(made)["aliases"] = memory  # known already
    return made


def _part_plan(part: Program) -> Plan:
    """The plan of a part, which leaves its arguments as they are."""
    return over_arguments(replace(make_plan(part), in_place={}))
