"""Few collectives, each of which begins when its last part is there and ends when the first is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, takewhile
from typing import Final

import torch
from torch import fx

from monograph.distributed.programs.begun import (
    GATHER,
    SCATTER,
    SUM,
    TOGETHER,
    Begun,
    Ready,
    begun_by,
    wait_late,
)
from monograph.distributed.programs.collectives import begins_collective
from monograph.distributed.programs.gather_again import AGAIN, gather_again
from monograph.distributed.programs.merge import merge
from monograph.ir.meta import UPDATE_PHASE, computes, form, labels, origin
from monograph.ir.ops.arithmetic import flops
from monograph.ir.program import Program
from monograph.passes.effects import is_elementwise

_aten = torch.ops.aten
_PART, _WRITE_PART, _COPY = _aten.slice.Tensor, _aten.slice_scatter.default, _aten.copy.default
FIRST_BYTES: Final = 1 << 20  # of the first bucket, so that something is on its way early
BUCKET_BYTES: Final = 25 << 20  # of others at most, as DistributedDataParallel has them
_BUCKETS: Final = 8  # of all that is reduced: the last one is waited for
_GATHERS: Final = 4  # of all that is gathered: two of them are held at a time
_AT_ONCE: Final = 0.02  # of the arithmetic of a step: what comes within that of a bucket joins it


def merge_collectives(program: Program) -> Program:
    """Merge collectives of one kind that do not need each other: reductions as what they add is made, gathers as they come.

    A gather begins while the values of the one before it are computed with; some are repeated for backward.
    """
    copy = program.rebuilt()
    graph = copy.graph
    if not any(begun_by(node) for node in graph.nodes):
        return program
    _read_parts_themselves(graph)
    wait_late(graph)
    work = {node: flops(node) for node in graph.nodes}  # none of what is added here, which packs and unpacks
    _merge_gathers(graph)
    _merge_reductions(graph, work)
    gather_again(graph)
    wait_late(graph)
    _gather_ahead(graph, work)
    return copy.with_graph(graph)


def _begun_in(graph: fx.Graph, *, gathers: bool) -> list[Begun]:
    found = (begun_by(node) for node in graph.nodes)
    return [item for item in found if item is not None and (item.op is GATHER) is gathers]


# --- state of which each process updates a part ---------------------------------------------------------------------------


def _read_parts_themselves(graph: fx.Graph) -> None:
    """Let what reads a part that was just written read that, and not write into the whole what is written once more."""
    for node in list(graph.nodes):
        whole = node.args[0] if node.args else None
        if not isinstance(whole, fx.Node) or whole.target is not _WRITE_PART:
            continue
        source, part, *place = whole.args
        if not (isinstance(source, fx.Node) and isinstance(part, fx.Node)):
            continue
        if node.target is _PART and [*node.args[1:]] == place and form(node) == form(part):
            if all(is_elementwise(reader.target) for reader in node.users):
                node.replace_all_uses_with(part)
        elif form(source) == form(whole) and (
            node.target is _COPY or (node.target is _WRITE_PART and [*node.args[2:]] == place)
        ):
            node.update_arg(0, source)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in (_PART, _WRITE_PART):
            graph.erase_node(node)


# --- sums and scattered sums -------------------------------------------------------------------------------------------


def _merge_reductions(graph: fx.Graph, work: Mapping[fx.Node, int]) -> None:
    needs = _needs(graph)
    beside = _sums_beside_parts(graph, needs)
    for kind in _in_order(needs):
        ready = Ready(graph)
        begun = [item for item in _begun_in(graph, gathers=False) if beside.get(item.kind, item.kind) == kind]
        begun.sort(key=lambda item: (ready.of(item.given), ready.place[item.begin]))
        for bucket in list(_buckets(begun, ready, work)):
            bucket.sort(key=lambda item: item.op is SUM)  # after scattered sums
            present = [found for item in bucket if (found := begun_by(item.begin)) is not None]
            _begin_early(present, Ready(graph))
            if len(present) > 1:
                merge(graph, present)


def _needs(graph: fx.Graph) -> dict[object, set[object]]:
    """By kind of collective the kinds whose results it sends on."""
    ready, needs = Ready(graph), dict[object, set[object]]()
    for item in _begun_in(graph, gathers=False):
        needs.setdefault(item.kind, set()).update(before.kind for before in ready.sends_on(item))
    return needs


def _sums_beside_parts(graph: fx.Graph, needs: Mapping[object, set[object]]) -> dict[object, object]:
    """By kind of sum the kind of scattered sum that it may go with: one of the same processes.

    A sum of small parameters at the end of backward would be waited for alone. Each of two processes can give the same to both parts
    instead. Of more, each part would be added in an order of its own, and copies would drift apart.
    """
    begun = _begun_in(graph, gathers=False)
    sent_on = set[object]().union(*needs.values())
    sums = {
        item.kind: item for item in begun if item.op is SUM and not (needs[item.kind] or item.kind in sent_on)
    }
    return {
        kind: other.kind
        for kind, item in sums.items()
        for other in begun
        if other.op is SCATTER and other.count == 2 and other.kind == _as_scattered(item, 2)
    }


def _as_scattered(item: Begun, count: int) -> object:
    """The kind that a sum has as one that is scattered in so many parts."""
    _, (how, group), *others = item.kind
    return SCATTER, (how, count, group), *others


def _in_order(needs: Mapping[object, set[object]]) -> list[object]:
    """Those first whose results others send on: sums of parts come after the parts. None that needs itself."""
    sums_again = {kind for kind, needed in needs.items() if kind in needed}
    others = {kind: needed - sums_again for kind, needed in needs.items() if kind not in sums_again}
    try:
        return [*TopologicalSorter(others).static_order()]
    except CycleError:
        return []


def _buckets(begun: Sequence[Begun], ready: Ready, work: Mapping[fx.Node, int]) -> Iterator[list[Begun]]:
    """Those that may be one, in order: none is read before what the last of them adds is there.

    A bucket is full at its usual size, unless what comes next is there at the same time: two would be no earlier than one.
    """
    bucket: list[Begun] = []
    limit, usual = FIRST_BYTES, _usual(begun, _BUCKETS)
    done = [0, *accumulate(work.get(node, 0) for node in ready.place)]  # before each op

    def between(first: Begun, second: Begun) -> int:
        return done[ready.of(second.given) + 1] - done[ready.of(first.given) + 1]

    for item in begun:
        held, nbytes = sum(map(_nbytes, bucket)), _nbytes(item)
        late = ready.of(item.given) >= min(map(ready.first_use, bucket), default=ready.end)
        is_full = held + nbytes > limit and 2 * held >= limit
        comes_later = bucket and between(bucket[-1], item) > _AT_ONCE * done[-1]
        if bucket and (late or held + nbytes > BUCKET_BYTES or (is_full and comes_later)):
            yield bucket
            bucket, limit = [], usual
        bucket.append(item)
    if bucket:
        yield bucket


def _usual(begun: Iterable[Begun], number: int) -> int:
    """The bytes of a bucket of some, where all are to be so many."""
    return min(BUCKET_BYTES, max(FIRST_BYTES, sum(map(_whole_nbytes, begun)) // number))


def _nbytes(item: Begun) -> int:
    """What it sends."""
    return item.numel * item.form.dtype.itemsize


def _whole_nbytes(item: Begun) -> int:
    """The larger of what it sends and what it makes."""
    return _nbytes(item) * (item.count if item.op is GATHER else 1)


def _begin_early(bucket: Sequence[Begun], ready: Ready) -> None:
    """Let what a bucket adds, and its collectives, stand right after the last op that they need."""
    begun = [item.begin for item in bucket]
    moved = [*ready.sent_by(*begun), *begun]
    needed = {source for node in moved for source in node.all_input_nodes} - set(moved)
    last = max(needed, key=ready.place.__getitem__)
    for node in (*_after(last, ready.sent_by(*begun), ready), *begun):
        last.append(node)
        last = node


def _after(there: fx.Node, nodes: Sequence[fx.Node], ready: Ready) -> list[fx.Node]:
    """Those that stand later. One that stands earlier may be sent by another collective too, and stays."""
    return [node for node in nodes if ready.place[node] > ready.place[there]]


# --- gathers -------------------------------------------------------------------------------------------------------------


def _merge_gathers(graph: fx.Graph) -> None:
    ready, found = Ready(graph), _begun_in(graph, gathers=True)
    bucket: list[Begun] = []
    usual = _usual((item for item in found if _phase(item) != UPDATE_PHASE), _GATHERS)
    for item in [*found, None]:
        joins = item is not None and bucket and item.kind == bucket[0].kind
        if joins and item is not None and _may_join(item, bucket, ready, usual):
            bucket.append(item)
            continue
        if len(bucket) > 1:
            begun = [each.begin for each in bucket]
            early = all(ready.of(each) < 0 for node in begun for each in node.all_input_nodes)
            there = begun[0] if early else begun[-1]
            now = Ready(graph)
            for node in (*_after(there, now.sent_by(*begun), now), *begun):
                if node is not there:
                    there.prepend(node)
            merge(graph, bucket)
        bucket = [] if item is None else [item]


def _may_join(item: Begun, bucket: Sequence[Begun], ready: Ready, usual: int) -> bool:
    """True for a gather that nothing reads what is gathered before, and for a small one of state that may begin earlier."""
    held = sum(map(_whole_nbytes, (*bucket, item)))
    if ready.place[item.begin] < min(map(ready.first_read, bucket)):
        return _phase(item) != UPDATE_PHASE or held <= BUCKET_BYTES
    return TOGETHER in labels(item.begin) and ready.of(item.given) < 0 and held <= usual


def _gather_ahead(graph: fx.Graph, work: Mapping[fx.Node, int]) -> None:
    """Let each gather begin before the first read of the one before it, the first of a phase at its start.

    A sum that begins at about the same time comes after it, since nothing reads that before the updates.
    """
    begun = _begun_in(graph, gathers=True)
    for before, item in zip([None, *begun], begun, strict=False):
        ready = Ready(graph)
        if before is not None and _phase(item) == _phase(before):
            there = _before_sums(before.wait, ready, work)
        elif before is not None or {AGAIN, TOGETHER}.intersection(labels(item.begin)):  # of parameters
            there = _start_of(_phase(item), ready, work)
        else:
            continue
        if ready.place[there] >= ready.place[item.begin]:
            continue
        moved = [*ready.sent_by(item.begin), item.begin]
        needed = {source for node in moved for source in node.all_input_nodes} - set(moved)
        if there not in moved and all(ready.place[source] < ready.place[there] for source in needed):
            for node in _after(there, moved, ready):
                there.prepend(node)


def _start_of(phase: str, ready: Ready, work: Mapping[fx.Node, int]) -> fx.Node:
    """The first op of a phase, or what comes after the collectives that begin before any arithmetic."""
    ops = [node for node in ready.place if computes(node) and origin(node).phase == phase]
    begun = [*filter(begins_collective, takewhile(lambda node: not work.get(node), ops))]
    first: fx.Node = begun[-1].next if begun else ops[0]
    return first


def _before_sums(there: fx.Node, ready: Ready, work: Mapping[fx.Node, int]) -> fx.Node:
    """The first of the sums that begin at about the time of an op, no gather among them; the op if there is none."""
    left, found = _AT_ONCE * sum(work.values()), there
    for node in [*ready.place][: ready.place[there]][::-1]:
        left -= work.get(node, 0)
        if left < 0 or node.target is GATHER:
            break
        if node.target in (SUM, SCATTER):
            found = node
    return found


def _phase(item: Begun) -> str:
    return origin(item.begin).phase
