"""Outputs of a step that are not returned: each value with the place that it goes to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.distributed.tensors import is_sharded, layout_of, local_of
from monograph.compat.tensors import planned_device
from monograph.errors import DistributedError
from monograph.ir.graph_signature import Assign, AssignPart, Copy, Fixed, Gradient, Target


@dataclass(frozen=True)
class StateOutput:
    """An output that is not returned to the caller: its value in the trace, where it goes, and its path."""

    value: Any
    target: Target
    path: str
    place: OwnPlace | None = None  # where build() put it, if it is copied into what was there


def in_parts(state_outputs: Iterable[StateOutput]) -> Iterator[StateOutput]:
    """With the part of this process in place of each DTensor.

    Raises DistributedError for one that is put where none of its form was.
    """
    for item in state_outputs:
        if not is_sharded(item.value):
            yield item
            continue
        target: Any = item.target
        if isinstance(target, Copy) and is_sharded(target.tensor):
            target = Copy(local_of(target.tensor))
        elif isinstance(target, Assign) and not target.requires_grad:
            target = AssignPart(target.container, target.key, layout_of(item.value))
        elif isinstance(target, Gradient):
            target = replace(target, around=layout_of(item.value))
        else:
            raise DistributedError(
                f"build() puts a DTensor into {item.path}, where there was none of its form",
                hint="keep what it holds: its to_local(), or its full_tensor()",
            )
        yield replace(item, value=local_of(item.value), target=target)


def fits(value: torch.Tensor, real: torch.Tensor) -> bool:
    """True if `value` can be copied into `real` as it is."""
    device = planned_device(real.device)
    return value.shape == real.shape and value.dtype == real.dtype and value.device == device


def take_own_memory(
    state_outputs: list[StateOutput], inputs: Inputs, own: Collection[torch.Tensor]
) -> tuple[list[tuple[OwnPlace, Any]], list[OwnPlace]]:
    """Places whose tensors the step replaces, with copies for them; and places where others have put something meanwhile.

    A step writes into the tensor that is there, where eager mode puts a new one: it must be nobody else's. `own` are the
    tensors that nobody but the graph has.
    """
    copies = {id(tensor): tensor for tensor in own}
    places: dict[tuple[int, Any], OwnPlace] = {}
    for index, state_output in enumerate(state_outputs):
        if state_output.place is None or not isinstance(state_output.target, Copy):
            continue
        places[id(state_output.place.container), state_output.place.key] = state_output.place
        old = state_output.target.tensor
        if id(old) not in copies:
            copies[id(old)] = copy = old.detach().clone()
            state_outputs[index] = replace(state_output, target=Copy(copy))
            for item in inputs.items:
                if item.real is old:
                    item.source = Fixed(copy)
    found, gone = [], []
    for place in places.values():
        tensors = place.tensors()
        if all(id(tensor) in copies for tensor in tensors):
            found.append((place, place.with_tensors([copies[id(tensor)] for tensor in tensors])))
        else:
            gone.append(place)
    return found, gone
