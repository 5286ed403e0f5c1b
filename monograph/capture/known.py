"""Values that are known while a step is captured: tensors made of constants by ops that always give the same.

Python may ask for them (`if mask.all():`), since no input, no state and no random number takes part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import getitem
from types import MappingProxyType
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
from monograph.capture.memory import memory_root, written_by

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


Literals = Mapping[int, torch.Tensor]  # inputs of a trace that are literals, by position


def known_value(
    tensor: object, tracer: Any, literals: Literals = MappingProxyType({})
) -> torch.Tensor | None:
    """The value of a tensor of an unfinished trace if it is the same at each step, else None."""
    node = traced_node(tensor, tracer)
    if node is None:
        return None
    inputs = (item for item in node.graph.nodes if item.op == "placeholder")
    given = (
        {item: literals[index] for index, item in enumerate(inputs) if index in literals} if literals else {}
    )
    needed = _constant_part(node, tracer.root, given)
    if needed is None:
        return None
    values: dict[fx.Node, Any] = dict(given)
    with outside_of_modes(), torch.no_grad():
        for item in needed:
            if item in given:
                continue
            if item.op == "get_attr":
                values[item] = getattr(tracer.root, str(item.target))
            else:
                args, kwargs = fx.map_arg((item.args, item.kwargs), values.__getitem__)
                values[item] = item.target(*args, **kwargs)  # type: ignore[operator]
    value: torch.Tensor = values[node]
    return value


def _constant_part(node: fx.Node, root: Any, given: Collection[fx.Node]) -> list[fx.Node] | None:
    """What makes `node`, in order, with the ops that change in place what it is made of; None if it may vary."""
    if _made_of_constants(node, root, given, {}) is None:  # most are not, and need no look at the whole graph
        return None
    writers: dict[fx.Node, list[fx.Node]] = {}
    for item in node.graph.nodes:
        for written in written_by(item):
            writers.setdefault(memory_root(written), []).append(item)
    needed = _made_of_constants(node, root, given, writers)
    return None if needed is None else [item for item in node.graph.nodes if item in needed]


def _made_of_constants(
    node: fx.Node, root: Any, given: Collection[fx.Node], writers: Mapping[fx.Node, list[fx.Node]]
) -> set[fx.Node] | None:
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        item = pending.pop()
        if item in needed:
            continue
        if item not in given and not _is_constant(item, root):
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


def literals_of(module: fx.GraphModule) -> set[int]:
    """The ids of the tensors in a recorded step that torch.tensor([...]) made."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr" and _is_constant(node, module)]
    return {id(getattr(module, str(node.target))) for node in nodes}


def _is_literal(node: fx.Node) -> bool:
    """True for what torch.tensor([...]) makes: it is copied before anything else reads it."""
    copies = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    return all(user.target in copies for user in node.users)
