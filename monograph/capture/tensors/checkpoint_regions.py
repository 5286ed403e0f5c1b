"""Regions of `torch.utils.checkpoint`: does it show that eager mode runs them twice?

Backward computes the values of a region again. Where that gives the same values and changes nothing, a trace records
the region once. It shows where the region changes state, as BatchNorm does, and where it draws other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from monograph.compat.ops import is_random
from monograph.errors import CaptureError
from monograph.ir.memory import changed_by, memory_root
from monograph.ir.meta import origin, set_origin


def mark_region(nodes: Sequence[fx.Node]) -> None:
    """Let the origins of nodes say that they are in one region. Of regions inside of each other the outermost counts."""
    number = (
        next((index for index, node in enumerate(nodes[0].graph.nodes, 1) if node is nodes[0]), 0)
        if nodes
        else 0
    )
    for node in nodes:
        set_origin(node, replace(origin(node), region=number))


def shows_again(region: Iterable[fx.Node], *, preserves: bool, reentrant: bool) -> bool:
    """True if the region has to be recorded twice, as eager mode runs it.

    `preserves` says that the second run draws the numbers of the first from the generators of the process. Raises
    CaptureError where a trace cannot do as eager does.
    """
    nodes = list(region)
    mark_region(nodes)
    inside = set(nodes)
    changes = any(memory_root(item) not in inside for node in nodes for item in changed_by(node))
    drawn = [node for node in nodes if is_random(node.target)]
    own = any(node.kwargs.get("generator") is not None for node in drawn)
    again = changes or own or (bool(drawn) and not preserves)
    if not again:
        return False
    what = "changes state (a buffer, such as those of BatchNorm)" if changes else "draws random numbers"
    if reentrant:
        raise CaptureError(
            f"a region of torch.utils.checkpoint {what}, and backward runs it a second time",
            hint="checkpoint it with use_reentrant=False, which is captured as eager mode runs it",
        )
    if drawn and preserves:
        raise CaptureError(
            f"a region of torch.utils.checkpoint {what} and draws random numbers that its second run repeats",
            hint="checkpoint what draws apart from what changes state, or pass preserve_rng_state=False",
        )
    return True
