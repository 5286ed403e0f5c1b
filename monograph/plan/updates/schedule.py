"""The order in which a step runs that updates its state in place: what can fail first, then each update as its gradient is there."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from monograph.compat.distributed.ops import communicates
from monograph.compat.ops import has_effect, is_custom, is_random
from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import ScalarMeta, TensorMeta, computes, form, value
from monograph.ir.ops.fused import left_as_they_are, written_over
from monograph.plan.alias import Aliases, Storage, aliases
from monograph.plan.lifetime import frees
from monograph.plan.memory import plan_memory
from monograph.plan.overwrite import overwrites
from monograph.plan.plan import Plan
from monograph.plan.updates.failing import can_fail, largest_of, numbers_of, views_hold
from monograph.plan.updates.groups import CHUNK_BYTES, TailCall, chunk_calls, early_calls_of, family_bytes
from monograph.plan.updates.tail import Tail

_LEAST_CHUNK: Final = 1 << 15  # bytes


@dataclass(frozen=True)
class Schedule:
    """A plan in the order in which it runs, in two parts, and the calls of the second.

    The `plan` has the ops of the first part first. Nothing in the second can fail: it may write. A call is an op of the program,
    or several of the tail by an op on lists. Ops of `over` write over an argument. `numbers` have to be finite and at most `largest`.
    """

    plan: Plan
    tail: Tail
    over: Mapping[fx.Node, fx.Node]
    first: tuple[fx.Node, ...]
    early: tuple[TailCall, ...]
    second: tuple[TailCall, ...]
    numbers: tuple[fx.Node, ...]
    largest: float
    is_sure: bool  # else a view of the second part may fail in the first step, where kernels give unforeseen strides


def schedule(
    plan: Plan,
    tail: Tail,
    *,
    at_once: bool = True,
    known: Container[Any] = (),
    chunk_bytes: int | None = None,
) -> Schedule:
    """Let updates run `at_once` when their gradients are there, or else in their order; as many together as `chunk_bytes` hold.

    By itself that is what a cache of the processor holds, or half of all gradients if they are few.

    `known` are functions that cannot fail, besides ops of torch.
    """
    first, rest = _two_parts(plan, tail, known)
    early = early_calls_of(tail)
    order = {node: index for index, node in enumerate(plan.program.graph.nodes)}
    begins = _begins(plan, tail, rest, order, at_once)
    if chunk_bytes is None:
        half = sum(map(family_bytes, tail.families)) // 2
        chunk_bytes = min(CHUNK_BYTES, max(half, _LEAST_CHUNK)) if at_once else CHUNK_BYTES
    second = list(_second(tail, rest, begins, order, chunk_bytes))
    numbers = dict.fromkeys([*tail.numbers, *(number for op in rest for number in numbers_of(op))])
    dtypes = {described.dtype for op in rest if numbers_of(op) and (described := form(op)) is not None}
    return _rebuilt(
        plan,
        tail,
        first,
        early,
        second,
        tuple(numbers),
        min([tail.largest, *map(largest_of, dtypes)]),
    )


# --- which ops run before anything is written ------------------------------------------------------------------------


def _two_parts(plan: Plan, tail: Tail, known: Container[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops that can fail with all before them, and the others without the tail.

    Ops that make numbers of state and of constants alone run early, wherever they are: they hold next to no memory.
    """
    last = {*tail.ops, *tail.exchange}
    ops = [node for node in plan.program.graph.nodes if computes(node) and node not in last]
    light = light_ops(plan.program.graph)
    failing = [
        index for index, op in enumerate(ops) if op not in light and op.target not in known and can_fail(op)
    ]
    begin = failing[-1] + 1 if failing else 0
    first = [*ops[:begin], *(op for op in ops[begin:] if op in light)]
    return first, [op for op in ops[begin:] if op not in light]


def light_ops(graph: fx.Graph) -> set[fx.Node]:
    """Ops that make a single number, out of single numbers that the step is given, or that such ops have made."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and not (
            is_random(node.target)
            or is_custom(node.target)
            or has_effect(node.target)
            or communicates(node.target)
        ):
            values = (node, *node.all_input_nodes)
            outside = (item for item in node.all_input_nodes if computes(item))
            if all(map(_is_single, values)) and all(item in found for item in outside):
                found.add(node)
    return found


def _is_single(node: fx.Node) -> bool:
    described = value(node)
    return isinstance(described, ScalarMeta) or (isinstance(described, TensorMeta) and not described.shape)


# --- when updates run ------------------------------------------------------------------------------------------------


def _second(
    tail: Tail,
    rest: Sequence[fx.Node],
    begins: Mapping[fx.Node, int],
    order: Mapping[fx.Node, int],
    chunk_bytes: int,
) -> Iterator[TailCall]:
    """The calls after the first part: families of the tail wait for each other until they fill a chunk."""
    waiting = sorted(tail.families, key=lambda family: begins[family[0]])
    chunk: list[tuple[fx.Node, ...]] = []
    held, place = 0, 0
    for op in [*rest, None]:
        while place < len(waiting) and (op is None or begins[waiting[place][0]] < order[op]):
            family = waiting[place]
            nbytes = family_bytes(family)
            if chunk and held + nbytes > chunk_bytes:
                yield from chunk_calls(chunk, tail)
                chunk, held = [], 0
            chunk.append(family)
            held, place = held + nbytes, place + 1
            if held >= chunk_bytes:
                yield from chunk_calls(chunk, tail)
                chunk, held = [], 0
        if op is not None:
            yield TailCall((op,))
    yield from chunk_calls(chunk, tail) if chunk else ()
    yield from (TailCall((op,)) for op in tail.exchange)


def _begins(
    plan: Plan, tail: Tail, rest: Sequence[fx.Node], order: Mapping[fx.Node, int], at_once: bool
) -> dict[fx.Node, int]:
    """By the first op of each family after which op it may begin: that makes what it needs, or reads last what it writes."""
    memory, computed = plan.aliases, set(rest)
    last_read = _last_reads(rest, memory, order)
    found = {}
    for family in tail.families:
        needed = [order[item] for op in family for item in op.all_input_nodes if item in computed]
        written = [item.name for op in family if op in tail.into for item in _written_by(op, tail.into[op])]
        read = [last_read.get(storage, -1) for name in written for storage in memory.possible[name]]
        found[family[0]] = max([*needed, *read, -1 if at_once else order[family[-1]]])
    return found


def _written_by(op: fx.Node, into: fx.Node) -> Iterator[fx.Node]:
    """What an op of the tail writes over: one value, or several of lists."""
    several = written_over(op)
    left = left_as_they_are(op)
    return (item for item in leaves_in((into,) if several is None else several) if item not in left)


def _last_reads(rest: Sequence[fx.Node], memory: Aliases, order: Mapping[fx.Node, int]) -> dict[Storage, int]:
    """When ops beside the tail read memory for the last time. To make a view is no read."""
    return {
        storage: order[op]
        for op in rest
        if op.name not in memory.views
        for item in op.all_input_nodes
        for storage in memory.possible[item.name]
    }


# --- the plan of that ------------------------------------------------------------------------------------------------


def _rebuilt(
    plan: Plan,
    tail: Tail,
    first: Sequence[fx.Node],
    early: Sequence[TailCall],
    second: Sequence[TailCall],
    numbers: tuple[fx.Node, ...],
    largest: float,
) -> Schedule:
    graph = plan.program.graph
    taken = _taken(tail)
    order = [node for node in graph.nodes if not computes(node) and node.op != "output"]
    order += first
    for call in second:
        order += [item for op in call.ops for item in (op, *taken.get(op, ()))]
    order.append(graph.output_node())
    program = plan.program.rebuilt(order)
    named = {node.name: node for node in program.graph.nodes}

    def here(call: TailCall) -> TailCall:
        return TailCall(tuple(named[op.name] for op in call.ops), call.list_op)

    into = {op.name: item.name for op, item in tail.into.items()}
    together = {op.name: call.ops[-1].name for call in second for op in call.ops}
    here_tail = tail.on(program)
    grouped = {op.name for call in early for op in call.ops}
    apart = {*here_tail.ops, *here_tail.exchange, *(named[name] for name in grouped)}
    over = overwrites(program.graph, aliases(program, into), apart=apart)
    into |= {op.name: item.name for op, item in over.items()}
    calls = tuple(map(here, second))
    memory = aliases(program, into)
    dead = frees(program.graph, kept=tail.written, together=together)
    inside = {part.program.name: part.memory for part in plan.parts}
    made = Plan(program, dead, plan.parts, plan_memory(program, dead, memory, inside), {}, into, tail.written)
    vars(made)["aliases"] = memory  # known already
    return Schedule(
        made,
        here_tail,
        over,
        tuple(named[op.name] for op in first),
        tuple(map(here, early)),
        calls,
        tuple(named[item.name] for item in numbers),
        largest,
        views_hold(program.graph, (op for call in calls for op in call.ops)),
    )


def _taken(tail: Tail) -> dict[fx.Node, list[fx.Node]]:
    """By fused update the ops that take it apart, which do not run."""
    run = {op for family in tail.families for op in family}
    found: dict[fx.Node, list[fx.Node]] = {}
    owner: dict[fx.Node, fx.Node] = {}
    for op in tail.ops:
        if op in run:
            owner[op] = op
        else:
            of = next(owner[item] for item in reversed(op.all_input_nodes) if item in owner)
            owner[op] = of
            found.setdefault(of, []).append(op)
    return found
