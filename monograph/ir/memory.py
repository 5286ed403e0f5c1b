"""Whose memory a value of a graph shows, and who writes to it."""

from __future__ import annotations

from operator import getitem
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.torch import writes_to_inputs

_SILENT_NORMS: Final = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


def memory_root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` shows, through views and through ops that return what they changed."""
    while (source := base_of(node)) is not None:
        node = source
    return node


def base_of(node: fx.Node) -> fx.Node | None:
    """The value that a node is a view of, or that it has changed and gives back; None if it has memory of its own."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.target is getitem else next(iter(_aliased(node, writes=False)), None)
    if not isinstance(source, fx.Node):
        return None
    if node.target is getitem and source.op == "call_function" and not _aliased(source, writes=False):
        return None  # each of several new results has memory of its own
    return source


def is_view(node: fx.Node) -> bool:
    """True for views, which work on any layout and read nothing."""
    return bool(_aliased(node, writes=False)) and not writes_to_inputs(node.target)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values that an op changes in place."""
    if not writes_to_inputs(node.target):
        return []
    found: list[fx.Node] = []
    fx.map_arg(_aliased(node, writes=True), found.append)
    return found


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The values that an op changes in place, also where its schema keeps silent about it."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in [getattr(torch.ops.aten, name) for name in _SILENT_NORMS]:
        return [item for item in node.args[3:5] if isinstance(item, fx.Node)] if node.args[5] else []
    return written_by(node)


def _aliased(node: fx.Node, *, writes: bool) -> list[Any]:
    """The arguments that an op's results show, or with `writes` those that it changes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    names = [argument.name for argument in schema.arguments]
    values = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [
        values.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and (argument.alias_info.is_write or not writes)
    ]


def last_writers(graph: fx.Graph) -> dict[int, fx.Node]:
    """The last op that changes each input, by the input's position."""
    inputs = {node: i for i, node in enumerate(item for item in graph.nodes if item.op == "placeholder")}
    return {
        inputs[root]: node
        for node in graph.nodes
        for root in map(memory_root, written_by(node))
        if root in inputs
    }
