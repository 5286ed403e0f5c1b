"""A checker that knows nothing of lifetimes: it only watches who reads what is no longer there."""

from __future__ import annotations

from monograph.errors import PlanError
from monograph.plan.plan import Plan


def check_plan(plan: Plan) -> None:
    """Walk the plan; raise PlanError for a read after a free, a double free, or a value freed before it exists."""
    for part in plan.parts:
        check_plan(part)
    alive: set[str] = set()
    for node in plan.program.graph.nodes:
        for needed in node.all_input_nodes:
            if needed.name not in alive:
                raise PlanError(f"{node.name} reads {needed.name}, which is not there")
        alive.add(node.name)
        for name in plan.frees.get(node.name, ()):
            if name not in alive:
                raise PlanError(f"{name} is freed after {node.name}, but it is not there")
            alive.remove(name)
