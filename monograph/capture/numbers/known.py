"""Values that are known while a step is captured: tensors made of constants by ops that always give the same.

Python may ask for them (`if mask.all():`), since no input, no state and no random number takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.random import on_empty
from monograph.compat.amp import without_autocast
from monograph.compat.fakes import is_fake
from monograph.compat.modes import outside_of_modes
from monograph.compat.ops import OpOverload, is_random
from monograph.compat.traces.nodes import traced_node
from monograph.ir.memory import base_of, memory_root, written_by

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
    needed = part_that_makes([node], given, lambda item: is_constant(item, tracer.root))
    if needed is None:
        return None
    value: torch.Tensor = evaluated(needed, tracer.root, given)[node]
    return value


def evaluated(
    needed: Sequence[fx.Node], root: Any, given: Mapping[fx.Node, Any], apart: Collection[fx.Node] = ()
) -> Mapping[fx.Node, Any]:
    """The values of nodes, each after those that it depends on. What is `given` stays as it is.

    Nodes that are `apart` run on empty tensors: nobody looks at what they give.
    """
    values: dict[fx.Node, Any] = {}
    written = written_roots(needed)
    with outside_of_modes(), without_autocast(), torch.no_grad():
        for item in needed:
            if item in given:
                values[item] = given[item].clone() if item in written else given[item]
            elif item.op == "get_attr":
                values[item] = getattr(root, str(item.target))
            else:
                known = (
                    fx.map_arg((item.args, item.kwargs), values.__getitem__) if item not in apart else None
                )
                args, kwargs = known if known is not None else on_empty(item, torch.empty_strided)
                values[item] = item.target(*args, **kwargs)  # type: ignore[operator]
    return values


def written_roots(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose memory some ops change in place."""
    return {memory_root(written) for node in nodes for written in written_by(node)}


def part_that_makes(
    nodes: Sequence[fx.Node], given: Collection[fx.Node], is_fine: Callable[[fx.Node], bool]
) -> list[fx.Node] | None:
    """What makes some nodes, in order, with the ops that change in place what they are made of.

    None if a part is not fine, apart from what is `given`.
    """
    if _needed(nodes, given, is_fine, with_writers=False) is None:  # most are not, and need no look at all
        return None
    needed = _needed(nodes, given, is_fine, with_writers=True)
    return None if needed is None else sorted(needed)


def _needed(
    nodes: Sequence[fx.Node],
    given: Collection[fx.Node],
    is_fine: Callable[[fx.Node], bool],
    *,
    with_writers: bool,
) -> set[fx.Node] | None:
    needed: set[fx.Node] = set()
    roots: set[fx.Node] = set()  # whose writers are known
    pending = list(nodes)
    while pending:
        item = pending.pop()
        if item in needed:
            continue
        if item not in given and not is_fine(item):
            return None
        needed.add(item)
        if item not in given:
            pending += item.all_input_nodes
        if with_writers and (root := memory_root(item)) not in roots:
            roots.add(root)
            pending += writers_of(root)
    return needed


def writers_of(root: fx.Node) -> list[fx.Node]:
    """The ops that change the memory of a value in place, that of its views included."""
    found, pending = [], [root]
    while pending:
        shown = pending.pop()
        for user in shown.users:
            if shown in written_by(user):
                found.append(user)
            if base_of(user) is shown:
                pending.append(user)
    return found


def is_constant(node: fx.Node, root: Any) -> bool:
    """True for literals, and for ops that always give the same for the same."""
    if node.op == "get_attr":  # a literal; free tensors are fakes here, and generators move
        value = getattr(root, str(node.target), None)
        return isinstance(value, torch.Tensor) and not is_fake(value) and _is_literal(node)
    known = isinstance(node.target, OpOverload) or node.target is getitem
    return node.op == "call_function" and known and not is_random(node.target)


def literals_of(module: fx.GraphModule) -> set[int]:
    """The ids of the tensors in a recorded step that torch.tensor([...]) made."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr" and is_constant(node, module)]
    return {id(getattr(module, str(node.target))) for node in nodes}


def _is_literal(node: fx.Node) -> bool:
    """True for what torch.tensor([...]) makes: it is copied before anything else reads it."""
    copies = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    return all(user.target in copies for user in node.users)
