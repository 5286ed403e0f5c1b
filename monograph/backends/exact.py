"""The `exact` backend: eager's bits, with the update of all state as compiled loops; the rest as on `aten`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from monograph.backends.aten import generated, in_single_ops, memory_notes, program_to_run
from monograph.backends.aten import lower as lower_plain
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.compat.inductor.loading import pointer_guard_in
from monograph.elementwise.compiling import compiled, entry_of
from monograph.elementwise.kinds import Item, items_of
from monograph.elementwise.parts import Part, parts_of
from monograph.elementwise.proof import choice_at, has_eagers_bits, prove, text_to_try, unproved
from monograph.elementwise.updates import CompiledUpdate, Group, OpByOp, UpdatedStep, grouped
from monograph.errors import BackendError
from monograph.ir.meta import output_nodes
from monograph.ir.ops.fused import IN_PLACE
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.text import count_text
from monograph.plan.lifetime import frees
from monograph.plan.plan import Plan
from monograph.runtime.runner import Runner


def lower(order: LoweringRequest) -> LoweredProgram:
    """A plan with a compiled update. Raises BackendError if there is no compiler."""
    lowering = Lowering(order)
    if lowering.is_empty:
        return replace(lower_plain(order), backend="exact", notes=("exact: there is nothing to compile",))
    return lowering.finished()


class Lowering:
    """What `lower` does, step by step: each names the code that it needs, which may be compiled beside the training."""

    def __init__(self, order: LoweringRequest) -> None:
        self._whole, self._stages, self._choices = program_to_run(order)
        self._plan = in_single_ops(self._whole)
        # `aten` runs fused updates in place; beside loops they would write new state apart
        fused = any(node.target in IN_PLACE for node in self._plan.program.ops())
        self.parts = [] if fused else parts_of(self._plan, order.in_place)
        self._items: list[Item] = []

    @property
    def is_empty(self) -> bool:
        """True if no state of the step is computed element by element."""
        return not self.parts

    def texts_to_try(self) -> list[str]:
        """The code that finds out which formulas hold here; none if that is known."""
        forms = unproved(self.parts)
        return [text_to_try(forms)] if forms else []

    def texts(self) -> list[str]:
        """The code of the updates, once the code to try is there."""
        prove(unproved(self.parts))
        self._items = items_of(self.parts, choice_at)
        if not self._items:
            raise BackendError("the bits of eager's kernels for this update are not known on this processor")
        return [kind.text for kind in grouped(self._items)]

    def finished(self) -> LoweredProgram:
        """The program with its updates; what is not compiled is compiled now."""
        if not self._items:
            self.texts()
        kinds = grouped(self._items)
        libraries = compiled([kind.text for kind in kinds])
        groups = [
            Group(kind, tuple(items), library)
            for (kind, items), library in zip(kinds.items(), libraries, strict=True)
            if all(has_eagers_bits(item, library) for item in (items[0], items[-1]))
        ]
        if not groups:
            raise BackendError(
                "the compiled update does not have the bits of eager's kernels on this processor"
            )
        step = self._step(groups)
        runner = Runner(step.run, written=step.written, has_begun=step.has_begun, update=step.update)
        parts = sum(len(group.items) for group in groups)
        ops = sum(len(item.part.nodes) for group in groups for item in group.items)
        note = f"exact: {count_text(ops, 'op')} of {count_text(parts, 'update')} in {count_text(len(groups), 'loop')}"
        notes = (note, *memory_notes(self._plan))
        guard = pointer_guard_in(entry_of(groups[0].kind.text).library)
        return LoweredProgram("exact", runner, self._stages, notes, self._choices, guard)

    def _step(self, groups: Sequence[Group]) -> UpdatedStep:
        plan, parts = self._plan, [item.part for group in groups for item in group.items]
        updates = [CompiledUpdate(group) for group in groups]
        values = list(dict.fromkeys(node for item in updates for node in (*item.tensors, *item.numbers)))
        before = generated(_without(plan, parts, values), quick=True)
        return UpdatedStep(
            plan.program,
            updates,
            values,
            {node: state for part in parts for node, state in part.writes.items()},
            OpByOp(
                before.run,
                before.noted,
                partial(generated, self._whole),
                lambda: generated(_only(plan, parts, values)),
            ),
        )


def _without(plan: Plan, parts: Sequence[Part], values: Sequence[fx.Node]) -> Plan:
    """A plan that leaves parts out: it gives None for what they write, and after the outputs what they read."""
    program, left_out = plan.program, {node for part in parts for node in part.nodes}
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node.op != "output" and node not in left_out:
            new[node] = _copied(graph, node, new)
    outputs = [
        (None if item in left_out else new[item]) if isinstance(item, fx.Node) else item
        for item in output_nodes(program.graph)
    ]
    graph.output((*outputs, *(new[node] for node in values)))
    return _planned(plan, program.with_graph(graph))


def _only(plan: Plan, parts: Sequence[Part], values: Sequence[fx.Node]) -> Plan:
    """A plan of parts alone: from what they read to what they write, in the order of the program's outputs."""
    program = plan.program
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in values:
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    kept = {node for part in parts for node in part.nodes}
    for node in program.graph.nodes:
        if node in kept:
            new[node] = _copied(graph, node, new)
    written = {node for part in parts for node in part.writes}
    graph.output(tuple(new[item] for item in output_nodes(program.graph) if item in written))
    inputs = tuple(Port(node.name, Role.PROBE, node.name) for node in graph.find_nodes(op="placeholder"))
    return _planned(plan, replace(program.with_graph(graph), inputs=inputs, outputs=()))


def _copied(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    made = graph.node_copy(node, new.__getitem__)
    made.meta = dict(node.meta)
    return made


def _planned(plan: Plan, program: Program) -> Plan:
    return replace(plan, program=program, frees=frees(program.graph), in_place={})
