"""What a compiled step holds, by what its code takes and gives back: other bytes than those of the plan, in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from monograph.compat.inductor.written.memory_lines import Stretch, Taken
from monograph.ir.meta import origin
from monograph.ir.program import Program
from monograph.plan.memory import Holder, MemoryPlan, Moment, peak_of
from monograph.user_code.lines import Origin


def held_by(stretches: Sequence[Stretch], program: Program, planned: MemoryPlan) -> MemoryPlan | None:
    """The memory of compiled code, with what the caller holds as it was planned; None if nothing is known of it.

    A moment is a piece of the code, by a node of the program. Sizes that vary count as they were when it was compiled.
    """
    if not stretches:
        return None
    held: dict[str, Taken] = {}
    peak, at_peak, now = Moment("", 0, 0), list[Taken](), 0
    timeline: list[Moment] = []
    for stretch in stretches:
        held |= {item.name: item for item in stretch.taken}
        running = now + sum(item.nbytes for item in stretch.taken)
        most = list(held.values()) if running > peak.running_bytes else at_peak
        now = running - sum(held.pop(name).nbytes for name in stretch.left)
        timeline.append(Moment(stretch.node, running, now))
        peak, at_peak = peak_of([peak, timeline[-1]]), most
    nodes = {node.name: node for node in program.graph.nodes}
    holders = [_holder(item, nodes) for item in at_peak]
    return replace(
        planned,
        peak_bytes=peak.running_bytes,
        peak_node=peak.node,
        holders=tuple(sorted(holders, key=lambda item: (-item.nbytes, item.node))),
        timeline=tuple(timeline),
    )


def _holder(item: Taken, nodes: Mapping[str, fx.Node]) -> Holder:
    node = nodes.get(item.node)
    where = Origin() if node is None else origin(node)
    return Holder(item.node, item.kind, item.nbytes, where)
