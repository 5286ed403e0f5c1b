"""Which ops in place of a recorded step become pure ones as they stand, and which have to be replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph.capture.tensors.functional.memory import Memories, Memory, is_plain
from monograph.capture.tensors.functional.pure_forms import (
    INVERSES,
    PARTS,
    Call,
    PureForm,
    is_understood,
    pure_form,
    written_call,
)
from monograph.capture.tensors.functional.results_on_fakes import Examples, evaluated, has_form
from monograph.compat.ops import is_random, schema_of, writes_to_inputs
from monograph.ir.call.nested import leaves_in
from monograph.ir.memory import marked_arguments

NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Write:
    """An op that writes as a pure one, and examples of what it gives.

    `written` are the values that it changes, in the order of its results. For each of them `wholes` has what the views
    that lead there make of the result, turned round one after the other: the last is the new value of the whole memory.
    """

    form: PureForm
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    example: Any
    written: tuple[fx.Node, ...] = ()
    wholes: tuple[tuple[Any, ...], ...] = ()
    laid_out: bool = False  # the result has to be copied into memory of the strides that are written


@dataclass(frozen=True)
class Rewriting:
    """Of a recorded step the writes by pure ops, the ops that are `replayed`, and the memory that only these may touch."""

    memories: Memories
    writes: Mapping[fx.Node, Write]
    replayed: Collection[fx.Node]
    apart: Collection[Memory]


def rewriting(graph: fx.Graph) -> Rewriting:
    """Decide for each op of a recorded step how it becomes pure."""
    memories, examples = Memories(graph), Examples()
    writes: dict[fx.Node, Write] = {}
    changing: dict[fx.Node, list[fx.Node]] = {}
    replayed: set[fx.Node] = set()
    apart: set[Memory] = set()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls:
        if not is_understood(node.target):
            replayed.add(node)
            apart.update(memories.of[item] for item in node.all_input_nodes)
            continue
        call = written_call(node)
        if call[0] is node.target and not writes_to_inputs(node.target):
            continue
        changing[node] = _written(call)
        write = _as_write(node, call, changing[node], memories, examples)
        if write is None:
            replayed.add(node)
            apart.update(memories.of[item] for item in changing[node])
        else:
            writes[node] = write
    _follow(calls, memories, changing, apart, replayed)
    return Rewriting(memories, writes, replayed, apart)


def all_replayed(graph: fx.Graph) -> Rewriting:
    """The same where kernels for fakes are missing or wrong."""
    memories = Memories(graph)
    replayed = {
        node
        for node in graph.nodes
        if node.op == "call_function" and not isinstance(node.meta.get("val"), NUMBERS)
    }
    return Rewriting(memories, {}, replayed, {memories.of[node] for node in graph.nodes})


def _follow(
    calls: Iterable[fx.Node],
    memories: Memories,
    changing: Mapping[fx.Node, list[fx.Node]],
    apart: set[Memory],
    replayed: set[fx.Node],
) -> None:
    """What shows or writes memory that is kept apart is replayed, and so is all memory that replayed ops make or write."""
    before = -1
    while before < len(replayed):
        before = len(replayed)
        for node in calls:
            memory, written = memories.of[node], [memories.of[item] for item in changing.get(node, ())]
            shows = memory.root is not node and memory in apart
            taken = node.target is getitem and node.args[0] in replayed
            if node in replayed or shows or taken or not apart.isdisjoint(written):
                replayed.add(node)
                apart.update((memory, *written))


def _written(call: Call) -> list[fx.Node]:
    target, args, kwargs = call
    found: list[fx.Node] = []
    if writes_to_inputs(target):
        fx.map_arg(marked_arguments(target, args, kwargs, writes=True), found.append)
    return found


def _as_write(
    node: fx.Node, call: Call, written: list[fx.Node], memories: Memories, examples: Examples
) -> Write | None:
    """None for a write that is not understood, or after which memory would be laid out otherwise than in eager mode."""
    target, args, kwargs = call
    if not writes_to_inputs(target):
        alone = PureForm(target, (), len(schema_of(target).returns))  # spelled otherwise, and nothing more
        return Write(alone, args, kwargs, node.meta["val"])
    form = pure_form(target)
    touched = {memories.of[item] for item in written}
    if form is None or len(touched) < len(written):
        return None
    if not all(memory.is_plain or memory.is_piece for memory in touched):
        return None
    tensors = (
        value for item in node.all_input_nodes if isinstance(value := item.meta.get("val"), torch.Tensor)
    )
    if not all(map(is_plain, tensors)):
        return None
    if is_random(target) and not all(item.meta["val"].is_contiguous() for item in written):
        return None  # they draw in the order of memory
    args = form.all_asked_for(args)
    kwargs = {name: item for name, item in kwargs.items() if name not in form.left_out}
    example = examples.of(form.op, args, kwargs, like=written)
    several = example[form.num_results :] if isinstance(example, (list, tuple)) else [example]
    made = list(leaves_in(several))
    if len(written) == 1 and not form.num_results and memories.of[written[0]].is_piece:
        return _as_write_to_piece(form, args, kwargs, example, written[0], memories)
    wholes = [_turned_round(*pair, memories) for pair in zip(written, made, strict=False)]
    if len(made) != len(written) or None in wholes:
        return None
    return Write(
        form, args, kwargs, example, tuple(written), tuple(item for item in wholes if item is not None)
    )


def _as_write_to_piece(
    form: PureForm, args: Any, kwargs: Any, example: Any, written: fx.Node, memories: Memories
) -> Write | None:
    """A write to one of the results of `unsafe_split`, which keeps its place between the others in eager mode."""
    like = written.meta["val"]
    if memories.views_to(written) or not has_form(example, like, of_part=True):
        return None
    return Write(form, args, kwargs, example, (written,), ((),), laid_out=not has_form(example, like))


def _turned_round(written: fx.Node, value: Any, memories: Memories) -> tuple[Any, ...] | None:
    """What the views that lead to a value make of a new one; None if the memory would be laid out otherwise then."""
    chain, root = memories.views_to(written), memories.of[written].root
    is_part = any(view.target in PARTS for view in chain)
    if not all(view.target in INVERSES for view in chain):
        return None
    if not has_form(value, written.meta["val"], of_part=is_part):
        return None
    made = [value]
    for view, base in reversed(list(zip(chain, [root, *chain], strict=False))):
        call = INVERSES[view.target](view, base, base.meta["val"], made[-1])
        if call is not None and (value := evaluated(*call)) is None:
            return None
        made.append(value)
    return tuple(made[1:]) if has_form(made[-1], root.meta["val"]) else None
