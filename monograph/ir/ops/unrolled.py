"""Recurrent layers that torch unrolls, and their backward, as one op each.

They run torch's own function, so that they give its bits, and autograd's. Which gradients are wanted they have to know: torch multiplies
otherwise where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from monograph.compat.autograd import autograd_inside

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "gru": torch.gru,
    "tanh": torch.rnn_tanh,
    "relu": torch.rnn_relu,
}
_LIBRARY: Final = torch.library.Library("monograph", "FRAGMENT")
_LIBRARY.define(
    "unrolled_layer(Tensor x, Tensor first, Tensor[] weights, str kind, bool both_ways, bool[] wanted)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "unrolled_layer_backward(Tensor? of_states, Tensor? of_last, Tensor x, Tensor first, Tensor[] weights, str kind,"
    " bool both_ways, bool[] wanted) -> Tensor[]"
)


def unrolled(
    x: torch.Tensor, first: torch.Tensor, weights: Sequence[torch.Tensor], kind: str, both_ways: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's layer of this kind: all states, and the last ones."""
    has_biases = len(weights) == (8 if both_ways else 4)
    states, last = _FUNCTIONS[kind](x, first, weights, has_biases, 1, 0.0, True, both_ways, False)
    return states, last


def _like_eagers(
    x: torch.Tensor, first: torch.Tensor, weights: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> list[torch.Tensor]:
    """What a layer is given, as leaves."""
    pairs = zip((x, first, *weights), wanted, strict=True)
    return [item.detach().requires_grad_(is_wanted) for item, is_wanted in pairs]


def _layer(*args: Any) -> tuple[torch.Tensor, ...]:
    x, first, weights, kind, both_ways, wanted = args
    with autograd_inside(), torch.enable_grad():
        given = _like_eagers(x, first, weights, wanted)
        return tuple(item.detach() for item in unrolled(given[0], given[1], given[2:], kind, both_ways))


def _backward(*args: Any) -> list[torch.Tensor]:
    """What autograd gives for the layer, which runs once more."""
    *grads, x, first, weights, kind, both_ways, wanted = args
    with autograd_inside(), torch.enable_grad():
        given = _like_eagers(x, first, weights, wanted)
        made = unrolled(given[0], given[1], given[2:], kind, both_ways)
        pairs = [(item, grad) for item, grad in zip(made, grads, strict=True) if grad is not None]
        asked = [item for item in given if item.requires_grad]
        found = torch.autograd.grad([item for item, _ in pairs], asked, [grad for _, grad in pairs])
    rest = [item.contiguous() for item in found[wanted[0] :]]
    return [_laid_out_for(x, found[0]), *rest] if wanted[0] else rest


def _is_by_columns(x: torch.Tensor) -> bool:
    """True if all rows of the input are one matrix that is laid out by columns: torch gives its gradient likewise."""
    rows = x.shape[0] * x.shape[1]
    return x.reshape(rows, x.shape[2]).stride() == (1, rows)


def _laid_out_for(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the input, in the layout that torch gives it."""
    if not _is_by_columns(x):
        return gradient.contiguous()
    columns = gradient.reshape(x.shape[0] * x.shape[1], x.shape[2]).t().contiguous()
    return columns.t().view(x.shape)


def _described(x: torch.Tensor, first: torch.Tensor, *_given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    steps, rows, _ = x.shape
    ways, _, units = first.shape
    return x.new_empty(steps, rows, ways * units), x.new_empty(ways, rows, units)


def _gradients_described(*args: Any) -> list[torch.Tensor]:
    _of_states, _of_last, x, first, weights, _kind, _both_ways, wanted = args
    pairs = zip((x, first, *weights), wanted, strict=True)
    made = [item.new_empty(item.shape) for item, is_wanted in pairs if is_wanted]
    return [_laid_out_for(x, made[0]), *made[1:]] if wanted[0] else made


_LIBRARY.impl("unrolled_layer", _layer, "CompositeExplicitAutograd")
_LIBRARY.impl("unrolled_layer_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("monograph::unrolled_layer", _described, lib=_LIBRARY)
torch.library.register_fake("monograph::unrolled_layer_backward", _gradients_described, lib=_LIBRARY)
UNROLLED_LAYER: Final = torch.ops.monograph.unrolled_layer.default
UNROLLED_LAYER_BACKWARD: Final = torch.ops.monograph.unrolled_layer_backward.default
