"""New state is taken over only if the whole step is finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.distributed.programs.collectives import groups_in
from monograph.ir.meta import TensorMeta, output_nodes, set_origin, value
from monograph.ir.port import FINITE, GRADIENTS, Port, Role
from monograph.ir.program import Program
from monograph.user_code.lines import Origin

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def gate_nonfinite(program: Program) -> Program:
    """Put a last output after the others, a flag, and keep the old state where it says that a step is not finite.

    Not finite are a NaN among the results and in new state, an infinity in a result without dimensions (a loss), and
    one in state that had none, of which gradients that stay are a part. Under a gradient scaler these do not count: it lets them overflow,
    and skips the step itself. Where a step is one of several processes, a number in one of them counts for all.
    """
    skips_itself = any(port.role is Role.SCALER for port in program.inputs)
    copy = program.rebuilt()
    graph = copy.graph
    before = dict(zip((port.path for port in copy.inputs), graph.find_nodes(op="placeholder"), strict=True))
    output = graph.output_node()
    with graph.inserting_before(output):
        writer = _Writer(graph)
        results = list(output_nodes(graph))
        flags = [
            writer.is_fine(item, before.get(port.path), port)
            for item, port in zip(results, copy.outputs, strict=True)
            if _counts(item, port) and not (skips_itself and port.path.startswith(GRADIENTS))
        ]
        if not flags:
            return program
        flag = writer.op(aten.all.default, writer.op(aten.stack.default, flags))
        for group in sorted(groups_in(program)):  # all processes keep the step, or none
            flag = writer.in_all_processes(flag, group)
        for index, port in copy.updates():
            old = before.get(port.path)
            if old is not None and _same_form(results[index], old):
                results[index] = writer.op(aten.where.self, flag, results[index], old)
    output.args = ((*results, flag),)
    made = copy.with_graph(graph)
    return replace(made, outputs=(*made.outputs, Port(flag.name, Role.PROBE, FINITE)))


def is_loss(item: fx.Node) -> bool:
    """True for a result without dimensions, also for those of micro-batches, which are stacked."""
    parts = item.args[0] if item.target is aten.stack.default else [item]
    forms = [value(part) for part in parts if isinstance(part, fx.Node)]  # type: ignore[union-attr]
    return all(isinstance(form, TensorMeta) and not form.shape for form in forms)


def _counts(item: Any, port: Port) -> bool:
    described = value(item) if isinstance(item, fx.Node) else None
    floating = isinstance(described, TensorMeta) and (
        described.dtype.is_floating_point or described.dtype.is_complex
    )
    return floating and port.role in (Role.USER, Role.STATE)


def _same_form(new: Any, old: fx.Node) -> bool:
    forms = [value(item) if isinstance(item, fx.Node) else None for item in (new, old)]
    return all(isinstance(form, TensorMeta) for form in forms) and forms[0].shape == forms[1].shape  # type: ignore[union-attr]


class _Writer:
    """Writes ops at one place of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph

    def op(self, target: Any, *args: Any) -> fx.Node:
        """One op, which the update is said to need."""
        node = self._graph.call_function(target, args)
        set_origin(node, Origin(phase="update"))
        return node

    def in_all_processes(self, flag: fx.Node, group: str) -> fx.Node:
        """True in the program if a flag is true in each process of a group."""
        number = self.op(aten._to_copy.default, flag)
        number.kwargs = {"dtype": torch.float32}
        least = self.op(c10d.wait_tensor.default, self.op(c10d.all_reduce.default, number, "min", group))
        return self.op(aten.ne.Scalar, least, 0)

    def is_fine(self, item: fx.Node, old: fx.Node | None, port: Port) -> fx.Node:
        """True in the program if a value may be taken over."""
        if port.role is Role.USER and not is_loss(item):
            return self.op(aten.all.default, self.op(aten.eq.Tensor, item, item))
        fine = self.op(aten.lt.Scalar, self.op(aten.abs.default, item), math.inf)
        if old is not None and _same_form(item, old):
            was = self.op(aten.lt.Scalar, self.op(aten.abs.default, old), math.inf)
            fine = self.op(aten.logical_or.default, fine, self.op(aten.logical_not.default, was))
        return self.op(aten.all.default, fine)
