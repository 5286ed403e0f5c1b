"""Gradients that stay after a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.tensors.fakes import Inputs
from monograph.ir.graph_signature import Argument, Gradient, HeldGradient
from monograph.ir.port import Role, gradient_path


def gradients_left(inputs: Inputs, without: list[str], *, keep_gradients: bool) -> Iterator[StateOutput]:
    """Gradients of parameters if they are kept, of arguments always, as eager leaves them.

    `without` gets the paths of the parameters that are trained and get none.
    """
    for item in inputs.items:
        tensor = item.shown
        asked = isinstance(tensor, torch.Tensor) and (tensor.is_leaf or tensor.retains_grad)
        gradient = tensor.grad if asked else None
        if item.role is Role.PARAM:
            if gradient is None and item.owner.requires_grad:
                without.append(item.path)
            held = inputs.by_fake.get(id(gradient))
            source = None if held is None else held.source
            if isinstance(source, HeldGradient) and source.parameter is item.owner:
                continue  # it was there before: what was added to it goes into it
            if keep_gradients and (item.owner.requires_grad or item.owner.grad is not None):
                path = f"{gradient_path(item.path)}/part" if item.sums_whole else gradient_path(item.path)
                yield StateOutput(gradient, Gradient(item.owner), path)
        elif gradient is not None and isinstance(item.source, Argument):
            target = Gradient(None, item.source.index)
            yield StateOutput(gradient, target, gradient_path(item.path))
