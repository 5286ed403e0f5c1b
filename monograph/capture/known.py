"""Values that are known while a step is captured: tensors made of constants by ops that always give the same.

Python may ask for them (`if mask.all():`), since no input, no state and no random number takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph._torch import (
    OpOverload,
    is_fake,
    is_random,
    outside_of_modes,
    traced_node,
)
from monograph.capture.functional import memory_root, written_by

READERS = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__int__,
        torch.Tensor.item,
        torch.Tensor.tolist,
    }
)


def known_value(tensor: object, tracer: Any) -> torch.Tensor | None:
    """The value of a tensor of an unfinished trace if it is the same at each step, else None."""
    node = traced_node(tensor, tracer)
    needed = None if node is None else _constant_part(node, tracer.root)
    if node is None or needed is None:
        return None
    values: dict[fx.Node, Any] = {}
    with outside_of_modes(), torch.no_grad():
        for item in needed:
            if item.op == "get_attr":
                values[item] = getattr(tracer.root, str(item.target))
            else:
                args, kwargs = fx.map_arg((item.args, item.kwargs), values.__getitem__)
                values[item] = item.target(*args, **kwargs)  # type: ignore[operator]
    value: torch.Tensor = values[node]
    return value


def _constant_part(node: fx.Node, root: Any) -> list[fx.Node] | None:
    """What makes `node`, in order, with the ops that change in place what it is made of; None if it may vary."""
    if _made_of_constants(node, root, {}) is None:  # most are not, and need no look at the whole graph
        return None
    writers: dict[fx.Node, list[fx.Node]] = {}
    for item in node.graph.nodes:
        for written in written_by(item):
            writers.setdefault(memory_root(written), []).append(item)
    needed = _made_of_constants(node, root, writers)
    return None if needed is None else [item for item in node.graph.nodes if item in needed]


def _made_of_constants(
    node: fx.Node, root: Any, writers: Mapping[fx.Node, list[fx.Node]]
) -> set[fx.Node] | None:
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        item = pending.pop()
        if item in needed:
            continue
        if not _is_constant(item, root):
            return None
        needed.add(item)
        pending += item.all_input_nodes + (writers.get(memory_root(item), []) if writers else [])
    return needed


def _is_constant(node: fx.Node, root: Any) -> bool:
    if node.op == "get_attr":  # a literal; free tensors are fakes here, and generators move
        value = getattr(root, str(node.target), None)
        return isinstance(value, torch.Tensor) and not is_fake(value) and _is_literal(node)
    known = isinstance(node.target, OpOverload) or node.target is getitem
    return node.op == "call_function" and known and not is_random(node.target)


def _is_literal(node: fx.Node) -> bool:
    """True for what torch.tensor([...]) makes: it is copied before anything else reads it."""
    copies = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    return all(user.target in copies for user in node.users)
