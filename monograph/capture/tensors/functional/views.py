"""What shows state or an argument which the step changes: a view of the live tensor, as in eager mode.

The program computes them from the new value; that value is copied into the live tensor after the last op, so a result
of the program would have memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.moving import is_moving
from monograph.errors import CaptureError
from monograph.ir.graph_signature import Assign, Copy, CopyToArgument, LiveView, Part, Result, Target
from monograph.ir.memory import memory_root
from monograph.ir.meta import output_nodes


@dataclass(frozen=True)
class Alias:
    """A result on the memory of another output, the one at `position`."""

    position: int
    value: torch.Tensor  # fakes: of the other output, and of the result
    result: torch.Tensor


def state_aliases(graph: fx.Graph, num_returned: int) -> dict[int, Alias]:
    """By position the results that share the memory of new state, which the outputs after them are."""
    outputs: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    roots: dict[fx.Node, int] = {}
    for position, node in enumerate(outputs[num_returned:], num_returned):
        if _is_tensor(node) and memory_root(node).op != "placeholder":
            roots.setdefault(memory_root(node), position)
    found = {}
    for position, node in enumerate(outputs[:num_returned]):
        if _is_tensor(node) and (owner := roots.get(memory_root(node))) is not None:
            found[position] = Alias(owner, outputs[owner].meta["val"], node.meta["val"])
    return found


def views_of_inputs(recorded: fx.Graph, written: Mapping[int, Target]) -> dict[int, LiveView]:
    """By position the results that are views of an input which is written in place; `written` are those, by position.

    In the recorded step they are views of the input itself, whatever its strides.
    """
    inputs = {node: position for position, node in enumerate(recorded.find_nodes(op="placeholder"))}
    found = {}
    for index, node in enumerate(output_nodes(recorded)):
        root = memory_root(node) if _is_tensor(node) else None
        target = written.get(inputs[root]) if root in inputs else None
        if root is None or not isinstance(target, (Copy, CopyToArgument)):
            continue
        whole, view = root.meta["val"], node.meta["val"]
        distance = view.storage_offset() * view.element_size() - whole.storage_offset() * whole.element_size()
        dtype = None if view.dtype is whole.dtype else view.dtype
        distance, rest = divmod(int(distance), view.element_size())
        if not rest:
            bits = _bits(view, whole if dtype is None else None)
            found[index] = LiveView(target, tuple(view.shape), view.stride(), distance, dtype, *bits)
    return found


def live_results(
    results: Sequence[Result],
    views: Mapping[int, LiveView],
    shown: Mapping[int, Alias],
    targets: Mapping[int, tuple[Target, torch.Tensor]],
) -> tuple[Result, ...]:
    """The results with a view of the live tensor where they show one; `targets` has it and its form by position."""
    made = []
    for result in results:
        if result.kind == "output":
            live = views.get(result.index) or _live_view(shown.get(result.index), targets)
            result = replace(result, live=_of_fixed_form(live, "a result"))
        made.append(result)
    return tuple(made)


def live_targets(
    targets: Sequence[Target], paths: Sequence[str], views: Mapping[int, LiveView], first: int
) -> list[Target]:
    """The places of new state that get a view of the live tensor; `first` is the position of their first output."""
    made = list(targets)
    for index, (target, path) in enumerate(zip(targets, paths, strict=True)):
        if isinstance(target, (Assign, Part)) and (live := views.get(first + index)) is not None:
            made[index] = replace(target, live=_of_fixed_form(live, path))
    return made


def _of_fixed_form(live: LiveView | None, path: str) -> LiveView | None:
    if live is not None and any(map(is_moving, (*live.size, *live.stride, live.distance))):
        raise CaptureError(f"{path} is a view of what the step changes, by a size that varies")
    return live


def _live_view(shown: Alias | None, targets: Mapping[int, tuple[Target, torch.Tensor]]) -> LiveView | None:
    target, form = targets.get(shown.position, (None, None)) if shown is not None else (None, None)
    if shown is None or form is None or not isinstance(target, (Copy, CopyToArgument)):
        return None
    if form.stride() != shown.value.stride() or form.dtype != shown.result.dtype:
        return None  # the copy lays it out otherwise: no view of one is a view of the other
    distance = int(shown.result.storage_offset() - shown.value.storage_offset())
    bits = _bits(shown.result, shown.value)
    return LiveView(target, tuple(shown.result.shape), shown.result.stride(), distance, None, *bits)


def _bits(view: torch.Tensor, whole: torch.Tensor | None) -> tuple[bool, bool]:
    """Whether a view is conjugated, and negated, where the tensor is not; None stands for plain memory."""
    conjugated, negated = (False, False) if whole is None else (whole.is_conj(), whole.is_neg())
    return view.is_conj() != conjugated, view.is_neg() != negated


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
