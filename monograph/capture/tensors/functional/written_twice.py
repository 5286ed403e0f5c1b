"""Ops in place whose outcome depends on the order in which they go through memory, or through several tensors.

A copy of a tensor onto itself, shifted, reads some elements after it has overwritten them. A view that shows an element
twice, such as that of `expand` or `unfold`, has one result for two.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from math import gcd

import torch
from torch import fx

from monograph.capture.numbers.moving import value_of
from monograph.compat.fakes import has_symbols
from monograph.compat.tensors import may_overlap
from monograph.errors import AliasError
from monograph.ir.memory import MemoryRoots, changed_by, written_by
from monograph.ir.meta import origin
from monograph.ir.printer import short_target
from monograph.layout import extent

_LARGEST = 1 << 28  # elements between the first and the last, for which a look at each one costs too much


def check_writes(graph: fx.Graph) -> None:
    """Raise AliasError for such an op in a recorded step."""
    roots = MemoryRoots()
    for node in graph.nodes:
        if node.op != "call_function" or torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            continue
        for written in written_by(node):
            root = roots.of(written)
            given_so = root.op == "placeholder" and _overlaps_itself(root.meta.get("val"))
            if not given_so and _overlaps_itself(written.meta.get("val")):  # of arguments `Overlaps` knows
                raise AliasError(
                    f"{short_target(node.target)} changes a view in place that shows elements of memory twice",
                    where=origin(node),
                    hint="change the tensor that it is a view of, or a .clone() of the view",
                )
        if node.target is torch.ops.aten.copy_.default:
            _check_copy(node, roots)
        elif len(changed := changed_by(node)) > 1:
            _check_several(node, set(changed), roots)


def _check_several(node: fx.Node, changed: set[fx.Node], roots: MemoryRoots) -> None:
    """An op that changes several tensors does so one after the other: what it changed first, others must not use.

    Lists go side by side: the tensors at one place in all of them are used together.
    """
    by_memory: defaultdict[fx.Node, list[tuple[int | None, fx.Node]]] = defaultdict(list)
    for argument in (*node.args, *node.kwargs.values()):
        items = enumerate(argument) if isinstance(argument, (list, tuple)) else [(None, argument)]
        for place, item in items:
            if isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor):
                by_memory[roots.of(item)].append((place, item))
    for used in by_memory.values():
        for (first_place, first), (second_place, second) in combinations(used, 2):
            beside = first_place is not None and first_place == second_place
            if beside or not changed & {first, second}:
                continue
            if _overlap(first.meta["val"], second.meta["val"]):
                raise AliasError(
                    f"{short_target(node.target)} changes several tensors, and of what it is given two share memory",
                    where=origin(node),
                    hint="give each tensor once, or a .clone(); to an optimizer each parameter once, or foreach=False",
                )


def _check_copy(node: fx.Node, roots: MemoryRoots) -> None:
    target, source = node.args[:2]
    if isinstance(target, fx.Node) and isinstance(source, fx.Node) and roots.of(target) is roots.of(source):
        written, read = target.meta["val"], source.meta["val"]
        if _layout(written) != _layout(read) and _overlap(written, read):
            raise AliasError(
                "copy_ reads memory that it writes: what eager mode makes of it depends on the order",
                where=origin(node),
                hint="copy from a .clone()",
            )


def _overlaps_itself(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return False
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not may_overlap(shape, strides):
        return False
    span = extent(shape, strides, 1)
    if span > _LARGEST:
        return True
    seen = torch.zeros(span, dtype=torch.bool, device="cpu")
    dimensions = [(size, step) for size, step in zip(shape, strides, strict=True) if step]
    seen.as_strided([size for size, _ in dimensions], [step for _, step in dimensions]).fill_(True)
    return int(seen.sum()) < tensor.numel()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two views of one memory have a byte in common. They may be fakes."""
    if has_symbols(first) or has_symbols(second):
        by_dimension = _overlap_in_a_grid(first, second)
        if by_dimension is not None:
            return by_dimension
    unit = gcd(first.element_size(), second.element_size())
    starts = [t.storage_offset() * t.element_size() // unit for t in (first, second)]
    ends = [
        start + extent(t.shape, t.stride(), t.element_size() // unit)
        for start, t in zip(starts, (first, second), strict=True)
    ]
    begin, end = min(starts), max(ends)
    if not first.numel() or not second.numel() or max(starts) >= min(ends):
        return False
    if end - begin > _LARGEST:
        return True
    seen = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    _units(seen, first, unit, starts[0] - begin).fill_(True)
    return bool(_units(seen, second, unit, starts[1] - begin).any())


def _overlap_in_a_grid(first: torch.Tensor, second: torch.Tensor) -> bool | None:
    """`_overlap` for views of one grid whose sizes may vary, by comparing them; None for others.

    A place in memory is a place in the grid, a number for each dimension, if no view reaches over the end of a row.
    """
    if first.element_size() != second.element_size() or first.stride() != second.stride():
        return None
    if not first.numel() or not second.numel():
        return False
    strides, row, apart = first.stride(), None, False
    starts = [first.storage_offset(), second.storage_offset()]
    for dim in sorted(range(first.dim()), key=lambda dim: -value_of(strides[dim])):
        if (step := strides[dim]) == 0:
            return None
        begins = [start // step for start in starts]
        starts = [start - begin * step for start, begin in zip(starts, begins, strict=True)]
        ends = [begin + view.shape[dim] for begin, view in zip(begins, (first, second), strict=True)]
        if row is not None and not all(end * step <= row for end in ends):
            return None
        apart = apart or bool(ends[0] <= begins[1]) or bool(ends[1] <= begins[0])
        row = step
    return not apart and bool(starts[0] == starts[1])


def _units(seen: torch.Tensor, tensor: torch.Tensor, unit: int, start: int) -> torch.Tensor:
    """What `tensor` has of a map of memory in units of bytes. A dimension without a step counts once."""
    size = tensor.element_size() // unit
    dimensions = [(n, step * size) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    shape, strides = [n for n, _ in dimensions], [step for _, step in dimensions]
    return seen.as_strided([*shape, size], [*strides, 1], start)
