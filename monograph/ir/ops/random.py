"""Which ops of a program draw random numbers."""

from __future__ import annotations

from torch import fx

from monograph.compat.ops import is_random, named_arguments

_ATTENTION = "scaled_dot_product"  # all ops of it may draw, and none does without dropout


def draws(node: fx.Node) -> bool:
    """True for a node that moves the random generator."""
    if not is_random(node.target):
        return False
    given = named_arguments(node.target, node.args, node.kwargs)
    return _ATTENTION not in str(node.target) or given.get("dropout_p", 0.0) != 0
