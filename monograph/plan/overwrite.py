"""Ops that may write what they make over one of their arguments, which nothing reads after them."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import (
    OpOverload,
    copies_its_result,
    find_op,
    is_custom,
    is_pointwise,
    overload_name,
    schema_arguments,
    schema_of,
)
from monograph.ir.meta import TensorMeta, form
from monograph.layout import fills_a_block
from monograph.plan.alias import Aliases
from monograph.plan.layouts import certain_layouts
from monograph.plan.lifetime import lifetimes

# Ops without torch's mark for those that work element by element, which read no element that they have written: the softmaxes
# read a row, or what they need of it, before they write it.
_ROW_BY_ROW: Final = """
    threshold_backward gelu_backward hardtanh_backward silu_backward sigmoid_backward tanh_backward leaky_relu_backward
    elu_backward softplus_backward hardsigmoid_backward softshrink_backward hardshrink_backward
    _log_softmax _softmax _log_softmax_backward_data _softmax_backward_data
"""
_READ_FIRST: Final = frozenset(
    {*(f"aten::{name}" for name in _ROW_BY_ROW.split()), "monograph::class_loss_backward"}
)
# what shows all of its argument, and the same numbers
_WHOLE: Final = (operator.getitem, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def overwrites(graph: fx.Graph, memory: Aliases, *, apart: Container[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The ops of a graph, in its order, that may write over an argument, and that, without those that are `apart`.

    That is memory which an op of torch has made and the argument fills, and which no value shows that is read later, or
    returned.
    """
    found: dict[fx.Node, fx.Node] = {}
    lives = lifetimes(graph, memory)
    makers = {node.name: node for node in graph.nodes}
    sure = certain_layouts(graph)
    for node in graph.nodes:
        if node in apart:
            continue
        for source in sources_of(node, memory, makers, sure):
            if lives[next(iter(memory.certain[source.name]))].last_read == node.name:
                found[node] = source
                break
    return found


def sources_of(
    node: fx.Node, memory: Aliases, makers: Mapping[str, fx.Node], sure: Container[fx.Node]
) -> Iterator[fx.Node]:
    """The arguments that an op may write over, each if nothing else shows its memory later. `makers` are all nodes by name.

    Where a value is not among the `sure` ones, the result of the op by itself may have another layout than its argument, and
    ops after it would have other bits.
    """
    described, into = form(node), op_into(node.target)
    if described is None or into is None or not _fills_a_block(described) or node not in sure:
        return
    args = node.args if into[1] else node.args[:1]
    for source in dict.fromkeys(item for item in args if isinstance(item, fx.Node)):
        if source in sure and form(source) == described and _may_go(node, source, described, memory, makers):
            yield source


@cache
def op_into(op: Any) -> tuple[Any, str] | None:
    """The op that writes what `op` gives into memory that it is given, and the name of that, which is empty for its first argument.

    None if none does so safely, and without memory for the result beside.
    """
    if not isinstance(op, OpOverload):
        return None
    name = str(schema_of(op).name)
    if not is_pointwise(op) and name not in _READ_FIRST:
        return None
    namespace, _, packet = name.partition("::")
    for overload in ("out", "grad_input", f"{overload_name(op)}_out"):
        found = find_op(namespace, packet, overload)
        if found is None or copies_its_result(found):
            continue
        if schema_arguments(found)[:-1] == schema_arguments(op):
            return found, schema_arguments(found)[-1].name
    found = find_op(namespace, f"{packet}_", overload_name(op) or "default")
    if found is None or copies_its_result(found) or schema_arguments(found) != schema_arguments(op):
        return None
    return found, ""


def _fills_a_block(described: TensorMeta) -> bool:
    """At the sizes of the capture; at others a tensor of these strides does so as well."""
    return fills_a_block([*map(int, described.shape)], [*map(int, described.stride)])


def _may_go(
    node: fx.Node, source: fx.Node, described: TensorMeta, memory: Aliases, makers: Mapping[str, fx.Node]
) -> bool:
    """True if an argument is all that shows its memory, of those of the op, fills it, and an op of torch has made that."""
    own = memory.possible[source.name]
    if len(own) != 1 or own != memory.certain[source.name]:
        return False
    (storage,) = own
    maker = makers[storage.maker]
    others = (item for item in node.all_input_nodes if item is not source)
    return (
        (source is maker or source.target in _WHOLE)
        and isinstance(maker.target, OpOverload)
        and not is_custom(maker.target)
        and storage.nbytes == described.extent
        and all(own.isdisjoint(memory.possible[item.name]) for item in others)
    )
