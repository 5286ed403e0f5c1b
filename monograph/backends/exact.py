"""The `exact` backend: eager's bits, with the update of all state and chains of element-wise ops as compiled loops.

The rest is as on `aten`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import CDLL
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import fx

from monograph.backends.as_updates import Watched, tail_with_updates, with_updates
from monograph.backends.aten import in_single_ops, memory_notes, program_to_run
from monograph.backends.aten import lower as lower_plain
from monograph.backends.chained import Function, chains_in, with_chains
from monograph.backends.lowering import LoweredProgram, LoweringRequest
from monograph.backends.python.generated import generated
from monograph.backends.python.two_parts import in_two_parts
from monograph.compat.inductor.loading import pointer_guard_in
from monograph.compat.ops import makes_memory
from monograph.compat.tensors import pointer_guard
from monograph.elementwise.chain_code import ChainCode, code_of
from monograph.elementwise.chains import Chain
from monograph.elementwise.compiling import compiled, entry_of
from monograph.elementwise.kinds import Item, Kind, items_of
from monograph.elementwise.parts import Part, parts_of, reads_what_is_known
from monograph.elementwise.proof import (
    choice_at,
    has_eagers_bits,
    has_one_mode,
    is_proved,
    prove,
    text_to_try,
    unproved,
)
from monograph.elementwise.updates import CompiledUpdate, Group, Update, grouped
from monograph.errors import BackendError
from monograph.ir.ops.fused import IN_PLACE
from monograph.ir.text import count_text
from monograph.plan.check import check_plan
from monograph.plan.memory import MemoryPlan
from monograph.plan.plan import Plan
from monograph.plan.updates.groups import TailCall
from monograph.plan.updates.schedule import light_ops, schedule
from monograph.plan.updates.tail import Tail
from monograph.runtime.runner import Runner


def lower(
    order: LoweringRequest, parts: Mapping[str, Callable[..., Any]] = MappingProxyType({})
) -> LoweredProgram:
    """A plan with a compiled update; `parts` as for `aten`. Raises BackendError if there is no compiler."""
    lowering = Lowering(order, parts)
    if lowering.is_empty:
        notes = ("exact: there is nothing to compile",)
        return replace(lower_plain(order, parts), backend="exact", notes=notes)
    return lowering.finished()


class Lowering:
    """What `lower` does, step by step: each names the code that it needs, which may be compiled beside the training."""

    def __init__(
        self, order: LoweringRequest, instead: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    ) -> None:
        """`instead` has functions for subgraphs, by name."""
        self._instead = instead
        self._whole, self._stages, self._choices = program_to_run(order)
        self._plan = in_single_ops(self._whole)
        self._in_place, self._at_once, self._chunk = order.in_place, order.updates_at_once, order.chunk_bytes
        # `aten` runs fused updates in place; beside loops they would write new state apart
        fused = any(node.target in IN_PLACE for node in self._plan.program.ops())
        parts = [] if fused else parts_of(self._plan, order.in_place)
        self._items: list[Item] = []
        self._codes: list[ChainCode] = []
        self._texts: list[str] = []
        self._light = light_ops(self._plan.program.graph)
        self._lay_out(
            [part for part in parts if has_one_mode(part.nodes) and reads_what_is_known(part, self._light)]
        )
        self._chains = chains_in(self._rest, self._may_be_chained)

    def _lay_out(self, parts: list[Part]) -> None:
        """Make each of these parts one op; without any, state is written in place as on `aten`."""
        self._parts = parts
        self._rest = with_updates(self._plan, [Update(part) for part in parts])
        self._tail = tail_with_updates(self._rest, self._in_place)
        self._last = frozenset((*self._tail.ops, *self._tail.early) if self._tail else ())

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
        held = {group.kind: group.library for group in groups}
        updates = [Update(item.part, item) for item in self._items if item.kind in held]
        rest = with_updates(self._plan, updates)
        tail = tail_with_updates(rest, self._in_place)
        calls = dict[Chain, Function]()
        if self._codes and len(updates) == len(self._items):
            rest, calls = with_chains(rest, self._codes, libraries[-1])
        runner, memory = self._runner(rest, tail, calls, held)
        notes = (_said(updates, groups, calls), *memory_notes(memory, self._plan))
        guard = pointer_guard_in(entry_of(groups[0].kind.text).library) if groups else pointer_guard
        return LoweredProgram("exact", runner, self._stages, notes, self._choices, guard, memory=memory)

    def _runner(
        self, rest: Plan, tail: Tail | None, calls: Mapping[Chain, Function], held: Mapping[Kind, CDLL]
    ) -> tuple[Runner, MemoryPlan]:
        """What runs the step, and what it holds."""
        own = [node.target for node in rest.program.ops() if makes_memory(node.target)]
        if tail is None:
            watched = Watched(self._plan, frozenset(), self._at_once)
            return watched.around(
                Runner(generated(rest, quick=True, own=own, parts=self._instead))
            ), rest.memory
        known = frozenset(call for chain, call in calls.items() if not chain.numbers)
        tail = tail.on(rest.program)
        made = schedule(rest, tail, at_once=self._at_once, known=known, chunk_bytes=self._chunk)
        check_plan(made.plan)
        firsts = {call.ops[0]: items for call in made.second if (items := _items_of(call))}
        loops = {
            op: CompiledUpdate(Group(items[0].kind, items, held[items[0].kind]), self._light)
            for op, items in firsts.items()
        }
        watched = Watched(self._plan, tail.written, self._at_once)
        run = in_two_parts(made, own=own, compiled=loops, watched=watched, parts=self._instead)
        return run, made.plan.memory


def _items_of(call: TailCall) -> tuple[Item, ...]:
    """The code of the updates that a call makes."""
    targets = (op.target for op in call.ops)
    return tuple(
        item for target in targets if isinstance(target, Update) and (item := target.item) is not None
    )


def _said(updates: Sequence[Update], groups: Sequence[Group], calls: Collection[Chain]) -> str:
    """What is compiled, in words."""
    ops = sum(len(update.part.nodes) for update in updates)
    loops = count_text(len(groups), "loop")
    said = [f"{count_text(ops, 'op')} of {count_text(len(updates), 'update')} in {loops}"] if updates else []
    ops = sum(len(item.nodes) for item in calls)
    said += [f"{count_text(ops, 'op')} in {count_text(len(calls), 'chain')}"] if calls else []
    return f"exact: {', '.join(said) or 'nothing is compiled'}"
