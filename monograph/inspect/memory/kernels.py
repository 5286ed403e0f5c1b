"""What kernels of libraries take for themselves where a step runs op by op: copies of images in oneDNN's layout, say."""

from __future__ import annotations

from functools import partial

from monograph.ir.evaluate import example_arguments
from monograph.ir.program import Program
from monograph.plan.memory import MemoryPlan
from monograph.runtime.workspaces import Workspaces


def kernel_bytes(program: Program, memory: MemoryPlan) -> int:
    """By how many bytes kernels exceed the peak of a plan; each kind runs once, on zeros. 0 where that is not known."""
    known, most, before = Workspaces(), memory.peak_bytes, 0
    nodes = {node.name: node for node in program.graph.nodes}
    for moment in memory.timeline:
        if (node := nodes.get(moment.node)) is not None and node.op == "call_function":
            most = max(most, before + known.allocated_by(node.target, partial(example_arguments, node)))
        before = moment.left_bytes
    return most - memory.peak_bytes
