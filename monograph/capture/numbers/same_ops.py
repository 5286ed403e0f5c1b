"""Do two traces of a step do the same? One has numbers that move where the other has plain ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.moving import is_moving
from monograph.ir.call.numbers import exactly
from monograph.ir.meta import frozen
from monograph.ir.printer import call_text

_MADE, _CONVERTED = torch.ops.aten.scalar_tensor.default, torch.ops.aten._to_copy.default
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def first_difference(plain: fx.Graph, moving: fx.Graph) -> str:
    """The first op of `plain` that `moving` does not do with the same arguments; "" if there is none.

    Numbers that move are the same as their present values.
    """
    for one, other in zip_longest(_ops(plain), _ops(moving)):
        if one is None or other is None or one[1] != other[1]:
            return call_text((one or other)[0])
    return ""


def _ops(graph: fx.Graph) -> Iterator[tuple[fx.Node, Hashable]]:
    """The ops on tensors, with what they do. Values are known by the order in which they come up."""
    order: dict[fx.Node, int] = {}

    def known(node: fx.Node) -> Hashable:
        number: Any = node.meta.get("val")
        if is_moving(number):
            return exactly(number.node.value) if number.node.is_known else "unknown"
        return "made", order.setdefault(node, len(order))

    for node in graph.nodes:
        if node.op == "call_function" and not is_moving(node.meta.get("val")) and not _is_number(node):
            yield node, (node.target, frozen(node.args, known), frozen(node.kwargs, known), known(node))


def _is_number(node: fx.Node) -> bool:
    """True for what `torch.tensor(number)` makes: of a plain number a literal, of one that moves a tensor of it."""
    if node.target in _LITERALS:
        return node.all_input_nodes[0].op in ("get_attr", "placeholder")
    if node.target is _MADE:
        return any(is_moving(item.meta.get("val")) for item in node.all_input_nodes)
    return node.target is _CONVERTED and node.all_input_nodes[0].target is _MADE
