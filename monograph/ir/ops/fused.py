"""The fused updates of optimizers as ops whose numbers may move.

PyTorch's own take floats: a number that moves in a trace would become a constant there. These take any numbers, change
nothing in place, and run PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import named_arguments, schema_of
from monograph.ir.memory import marked_arguments

_LIBRARY: Final = torch.library.Library("monograph", "FRAGMENT")
GRADIENTS: Final = "grads"
_OF_SCALERS: Final = ("grad_scale", "found_inf")
FUSED_NAMES: Final = ("fused_adam", "fused_adamw", "fused_sgd", "fused_adagrad")


def written_by_fused(in_place: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Any]]:
    """The lists of tensors that PyTorch's op changes in place, in the order in which ours gives them anew."""
    return marked_arguments(in_place, args, kwargs, writes=True)


def _define(name: str, overload: str) -> tuple[Any, Any]:
    """PyTorch's op that works in place, and ours."""
    in_place = getattr(getattr(torch.ops.aten, f"_{name}_"), overload)
    functional = getattr(getattr(torch.ops.aten, f"_{name}"), overload)
    full = name if overload == "default" else f"{name}.{overload}"
    arguments = str(schema_of(functional)).partition("(")[2]
    _LIBRARY.define(f"{full}({arguments.replace('float ', 'Scalar ')}")

    def described(*args: Any, **kwargs: Any) -> Any:
        written = written_by_fused(in_place, args, kwargs)
        return tuple([torch.empty_like(item) for item in items] for items in written)

    _LIBRARY.impl(full, _calling(functional), "CompositeExplicitAutograd")
    torch.library.register_fake(f"monograph::{full}", described, lib=_LIBRARY)
    return in_place, getattr(getattr(torch.ops.monograph, name), overload)


def _calling(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: op(*args, **kwargs)


FUSED: Final[Mapping[Any, Any]] = dict(
    _define(name, overload) for name in FUSED_NAMES for overload in ("default", "tensor_lr")
)
IN_PLACE: Final[Mapping[Any, Any]] = {ours: in_place for in_place, ours in FUSED.items()}


def has_scaler(node: fx.Node) -> bool:
    """True for a fused update that a scaler gives its numbers: it changes gradients, too."""
    given = named_arguments(node.target, node.args, node.kwargs)
    return any(given.get(name) is not None for name in _OF_SCALERS)


def left_as_they_are(node: fx.Node) -> frozenset[fx.Node]:
    """Of those values the ones that keep their numbers: gradients, which only a scaler changes."""
    if node.target not in IN_PLACE or has_scaler(node):
        return frozenset()
    return frozenset(named_arguments(node.target, node.args, node.kwargs)[GRADIENTS])


def written_over(node: fx.Node) -> tuple[Any, ...] | None:
    """The values that an update of several changes where it works in place, nested as its results; None for any other op.

    Besides the fused ones of torch that is any function whose `written` are the positions of such arguments.
    """
    in_place = IN_PLACE.get(node.target)
    if in_place is not None:
        return tuple(map(tuple, written_by_fused(in_place, node.args, node.kwargs)))
    written: Sequence[int] | None = getattr(node.target, "written", None)
    return None if written is None else tuple(node.args[place] for place in written)
