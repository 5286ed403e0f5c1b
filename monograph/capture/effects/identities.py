"""Tensors that must stay the objects that they are: steps put others in their places instead of writing into them.

A step that puts a new tensor somewhere writes into the one that is there, which is the graph's own. That shows if the old
one goes on being changed or is known elsewhere: who has it would miss that. Then each step puts the very tensors of eager
mode there, and the build is bound to them at the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.modes import current_tracer
from monograph.compat.tensors import storage_key
from monograph.compat.traces.nodes import traced_node
from monograph.errors import CaptureError
from monograph.ir.call.tree import flatten
from monograph.ir.graph_signature import Argument, Assign, Copy, Part
from monograph.ir.memory import Writes
from monograph.ir.port import Role


def keep_identities(
    state_outputs: list[StateOutput],
    inputs: Inputs,
    is_written: Callable[[torch.Tensor], bool],
    known: Collection[int],
) -> list[OwnPlace]:
    """Let steps put tensors themselves where copies would show; gives those places.

    `is_written` says whether the step changes a tensor of the trace in place, `known` are the ids of tensors that it
    leaves elsewhere.
    """

    waiting: dict[tuple[int, Any], list[int]] = {}
    for index, item in enumerate(state_outputs):
        if item.place is not None and isinstance(item.target, Copy):
            waiting.setdefault((id(item.place.container), item.place.key), []).append(index)

    owners: dict[int, set[int]] = {}
    for real, fake in inputs.by_real.items():
        owners.setdefault(_memory_of(fake), set()).add(real)

    def shown_by(value: torch.Tensor) -> set[int]:
        """The ids of the tensors from outside on whose memory a tensor of the trace is."""
        itself = inputs.real_of(value)
        return {id(itself)} if itself is not None else owners.get(_memory_of(value), set())

    def shows(item: StateOutput) -> bool:
        assert isinstance(item.target, Copy)
        old, shown = item.target.tensor, shown_by(item.value)
        changed = is_written(inputs.fake(old)) or (shown and is_written(item.value))
        is_view = inputs.real_of(item.value) is None
        return changed or id(old) in elsewhere or (is_view and not shown.isdisjoint(elsewhere))

    kept, elsewhere = [], set(known)
    while found := [key for key, indexes in waiting.items() if any(shows(state_outputs[i]) for i in indexes)]:
        for key in found:
            indexes = waiting.pop(key)
            items = [state_outputs[index] for index in indexes]
            kept += [item.place for item in items[:1] if item.place is not None]
            elsewhere |= {id(inputs.real_of(item.value)) for item in items}
            _check_no_state_on_state(
                [item for item in items if inputs.real_of(item.value) is None and shown_by(item.value)],
                inputs,
            )
            for index, item in zip(indexes, _put(items, inputs), strict=True):
                state_outputs[index] = replace(item, path=f"{item.path}.next", place=None)
    return kept


def _check_no_state_on_state(views: list[StateOutput], inputs: Inputs) -> None:
    """Raise CaptureError for a view in the place of a tensor that the step is given: the next one would be given both."""
    tracer = current_tracer()
    for item in views:
        assert isinstance(item.target, Copy)
        before = inputs.fake(item.target.tensor)
        node, known = traced_node(before, tracer), inputs.by_fake.get(id(before))
        if (node is not None and node.users) or (known is not None and known.role is Role.BUFFER):
            raise CaptureError(
                f"build() puts a view of another tensor into {item.path}, and changes one of the two in place",
                hint="put the tensor itself there, or a copy: view.clone()",
            )


def _memory_of(tensor: torch.Tensor) -> int:
    return id(tensor) if is_sharded(tensor) else storage_key(tensor)


def written_in_trace() -> Callable[[torch.Tensor], bool]:
    """Says whether the trace that runs has changed one of its tensors in place so far."""
    tracer = current_tracer()
    writes = Writes(tracer.graph)

    def is_written(tensor: torch.Tensor) -> bool:
        node = traced_node(tensor, tracer)
        return node is not None and bool(writes.to(node))

    return is_written


def _put(items: list[StateOutput], inputs: Inputs) -> Iterator[StateOutput]:
    """The outputs of one place, as tensors that are put there."""
    place = items[0].place
    assert place is not None
    if place.leaves is None:
        (item,) = items
        source = found.source if (found := inputs.by_fake.get(id(item.value))) is not None else None
        argument = source.index if isinstance(source, Argument) else None
        tensor = inputs.real_of(item.value)
        yield replace(item, target=Assign(place.container, place.key, argument=argument, tensor=tensor))
        return
    leaves: list[Any] = []
    tree = flatten(place.get(), leaves)
    for index, item in zip(place.leaves, items, strict=True):
        tensor, last = inputs.real_of(item.value), index == place.leaves[-1]
        part = Part(place.container, place.key, tree, leaves, index, last, tensor)
        yield replace(item, target=part)
