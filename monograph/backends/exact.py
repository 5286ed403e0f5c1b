"""The `exact` backend: eager's bits, with the update of all state and chains of element-wise ops as compiled loops.

The rest is as on `aten`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from monograph.backends.aten import (
    Generated,
    generated,
    in_single_ops,
    in_two_parts,
    memory_notes,
    program_to_run,
)
from monograph.backends.aten import lower as lower_plain
from monograph.backends.chained import Function, chains_in, copied, with_chains
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.compat.inductor.loading import pointer_guard_in
from monograph.compat.tensors import pointer_guard
from monograph.elementwise.chain_code import ChainCode, code_of
from monograph.elementwise.chains import Chain
from monograph.elementwise.compiling import compiled, entry_of
from monograph.elementwise.kinds import Item, items_of
from monograph.elementwise.parts import Part, parts_of
from monograph.elementwise.proof import (
    choice_at,
    has_eagers_bits,
    has_one_mode,
    is_proved,
    prove,
    text_to_try,
    unproved,
)
from monograph.elementwise.updates import CompiledUpdate, Group, OpByOp, UpdatedStep, grouped
from monograph.errors import BackendError
from monograph.ir.meta import output_nodes
from monograph.ir.ops.fused import IN_PLACE
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.text import count_text
from monograph.plan.lifetime import frees
from monograph.plan.plan import Plan
from monograph.plan.schedule import schedule
from monograph.plan.tail import tail_of
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
        self._in_place = order.in_place
        # `aten` runs fused updates in place; beside loops they would write new state apart
        fused = any(node.target in IN_PLACE for node in self._plan.program.ops())
        parts = [] if fused else parts_of(self._plan, order.in_place)
        self._items: list[Item] = []
        self._codes: list[ChainCode] = []
        self._texts: list[str] = []
        self._lay_out([part for part in parts if has_one_mode(part.nodes)])
        self._chains = chains_in(self._rest, self._may_be_chained)

    def _lay_out(self, parts: list[Part]) -> None:
        """Leave these parts out of the ops; without any, state is written in place as on `aten`."""
        self._parts = parts
        self._tail = None if parts else tail_of(self._plan, self._in_place)
        self._last = frozenset((*self._tail.ops, *self._tail.early) if self._tail else ())
        self._rest = _without(self._plan, parts)

    @property
    def is_empty(self) -> bool:
        """True if nothing of the step can be compiled."""
        return not self._parts and not self._chains

    def _may_be_chained(self, node: fx.Node) -> bool:
        return node not in self._last and has_one_mode([node])

    def texts_to_try(self) -> list[str]:
        """The code that finds out which formulas hold here; none if that is known."""
        forms = unproved((*self._parts, *self._chains))
        return [text_to_try(forms)] if forms else []

    def texts(self) -> list[str]:
        """The code of the updates and chains, once the code to try is there."""
        prove(unproved((*self._parts, *self._chains)))
        self._items = items_of(self._parts, choice_at)
        self._texts = [kind.text for kind in grouped(self._items)]
        self._lay_out([item.part for item in self._items])
        chains = chains_in(self._rest, lambda node: self._may_be_chained(node) and is_proved(node))
        text, self._codes = code_of(chains, choice_at)
        self._texts += [text] if self._codes else []
        if not self._texts:
            raise BackendError("the bits of eager's kernels for these ops are not known on this processor")
        return self._texts

    def finished(self) -> LoweredProgram:
        """The program with its updates and chains; what is not compiled is compiled now."""
        libraries = compiled(self._texts or self.texts())
        kinds = grouped(self._items)
        groups = [
            Group(kind, tuple(items), library)
            for (kind, items), library in zip(kinds.items(), libraries, strict=False)
            if all(has_eagers_bits(item, library) for item in (items[0], items[-1]))
        ]
        if kinds and not groups:
            raise BackendError(
                "the compiled update does not have the bits of eager's kernels on this processor"
            )
        held = {group.kind for group in groups}
        parts = [item.part for item in self._items if item.kind in held]
        rest, calls = self._rest, dict[Chain, Function]()
        if len(parts) < len(self._items):
            rest = _without(self._plan, parts)
        elif self._codes:
            rest, calls = with_chains(self._rest, self._codes, libraries[-1])
        if self._tail is None:
            step = self._step(groups, parts, generated(rest, quick=True, own=calls.values()))
            runner = Runner(step.run, written=step.written, has_begun=step.has_begun, update=step.update)
        else:
            known = frozenset(call for chain, call in calls.items() if not chain.numbers)
            made = schedule(rest, self._tail.on(rest.program), known=known)
            runner = in_two_parts(made, own=calls.values())
        notes = (_said(parts, groups, calls), *memory_notes(self._plan.memory, self._plan))
        guard = pointer_guard_in(entry_of(groups[0].kind.text).library) if groups else pointer_guard
        return LoweredProgram("exact", runner, self._stages, notes, self._choices, guard)

    def _step(self, groups: Sequence[Group], parts: Sequence[Part], before: Generated) -> UpdatedStep:
        values = _read_by(parts)
        return UpdatedStep(
            self._plan.program,
            [CompiledUpdate(group) for group in groups],
            values,
            {node: state for part in parts for node, state in part.writes.items()},
            OpByOp(
                before.run,
                before.noted,
                partial(generated, self._whole),
                lambda: generated(_only(self._plan, parts, values)),
            ),
        )


def _said(parts: Sequence[Part], groups: Sequence[Group], calls: Collection[Chain]) -> str:
    """What is compiled, in words."""
    ops = sum(len(part.nodes) for part in parts)
    loops = count_text(len(groups), "loop")
    said = [f"{count_text(ops, 'op')} of {count_text(len(parts), 'update')} in {loops}"] if parts else []
    ops = sum(len(item.nodes) for item in calls)
    said += [f"{count_text(ops, 'op')} in {count_text(len(calls), 'chain')}"] if calls else []
    return f"exact: {', '.join(said) or 'nothing is compiled'}"


def _read_by(parts: Sequence[Part]) -> list[fx.Node]:
    """What updates are given: tensors, numbers, and the state that they write."""
    return list(dict.fromkeys(node for part in parts for node in (*part.inputs, *part.writes.values())))


def _without(plan: Plan, parts: Sequence[Part]) -> Plan:
    """A plan that leaves parts out: it gives None for what they write, and after the outputs what they read."""
    if not parts:
        return plan
    program, left_out = plan.program, {node for part in parts for node in part.nodes}
    values = _read_by(parts)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node.op != "output" and node not in left_out:
            new[node] = copied(graph, node, new)
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
            new[node] = copied(graph, node, new)
    written = {node for part in parts for node in part.writes}
    graph.output(tuple(new[item] for item in output_nodes(program.graph) if item in written))
    inputs = tuple(Port(node.name, Role.PROBE, node.name) for node in graph.find_nodes(op="placeholder"))
    return _planned(plan, replace(program.with_graph(graph), inputs=inputs, outputs=()))


def _planned(plan: Plan, program: Program) -> Plan:
    return replace(plan, program=program, frees=frees(program.graph), in_place={})
