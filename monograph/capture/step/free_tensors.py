"""Tensors from outside that a step uses: they become inputs, and are guarded where it only asks what they are."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads
from monograph.capture.guards.tensor_forms import Form, OwnGradient, WithoutGradients, as_guard
from monograph.capture.numbers.known import literals_of
from monograph.capture.tensors.fakes import Inputs
from monograph.capture.tensors.functional.lifting import lift_constants
from monograph.compat.fakes import is_fake, make_fake
from monograph.ir.graph_signature import Fixed
from monograph.ir.port import FREE, Role


def lift_free_tensors(
    recorded: fx.GraphModule, inputs: Inputs, reads: Reads, *, with_values: bool
) -> dict[int, torch.Tensor]:
    """Make them inputs; state that leaked past the fakes becomes the input it is. Gives the literals, by position."""
    placeholders = [node for node in recorded.graph.nodes if node.op == "placeholder"]
    known = {
        id(item.real): node
        for item, node in zip(inputs.items, placeholders, strict=True)
        if item.real is not None
    }
    known |= {id(item.fake): node for item, node in zip(inputs.items, placeholders, strict=True)}
    made = partial(make_fake, inputs.mode, with_value=with_values, planned=inputs.without_data)
    literals, found = literals_of(recorded), dict[int, torch.Tensor]()
    labels = {
        id(value): f"{entered.label}.{name}"
        for entered in reads.entered.values()
        for name, value in entered.before.items()
        if issubclass(type(value), torch.Tensor)
    }
    for tensor in lift_constants(recorded, known):
        real = inputs.free.get(id(tensor), tensor)
        faked = is_fake(tensor)
        fake = tensor if faked else made(real)
        if id(tensor) in literals:
            found[len(inputs.items)] = tensor
        path = labels.pop(id(real), str(len(inputs.items)))
        inputs.add(fake, Role.CAPTURED, f"{FREE}{path}", Fixed(real))
    return found


def guard_free_tensors(inputs: Inputs, reach: Reach) -> None:
    """Guard the form of those that are no inputs, and gradients of all tensors that the step asks for."""
    used, label = {id(item.real) for item in inputs.items}, "a tensor that build() asks"
    for fake_id, real in inputs.free.items():
        if id(real) not in used:
            reach.sources.append(as_guard(Form(label, real, followed=False)))
        if fake_id in inputs.asked_for_gradient_of_free:
            whole = id(real.grad) in used
            reach.sources.append(as_guard(OwnGradient(label, real, whole, followed=False)))
    if inputs.without_gradient:
        items = [inputs.by_fake[fake_id] for fake_id in inputs.without_gradient]
        parameters = {item.path: item.owner for item in items}
        label = "the list of parameters with a gradient before the step"
        reach.sources.append(as_guard(WithoutGradients(label, parameters, followed=False)))
