"""The update of all parameters in few ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from monograph.ir.meta import TensorMeta, metas, origin, set_origin, set_value, value
from monograph.ir.program import Program
from monograph.passes.updates import update_nodes

aten = torch.ops.aten
Key = tuple[Any, ...]


class _Family(NamedTuple):
    """The ops on lists that stand for an op: with a tensor, one number, or a number for each tensor at the end."""

    tensors: Any = None
    number: Any = None
    numbers: Any = None
    option: str = ""  # the keyword that the number is given by, the last argument otherwise
    usual: float = 1  # what the option is if it is not given


_FAMILIES: dict[Any, _Family] = {
    aten.abs.default: _Family(aten._foreach_abs.default),
    aten.neg.default: _Family(aten._foreach_neg.default),
    aten.reciprocal.default: _Family(aten._foreach_reciprocal.default),
    aten.sign.default: _Family(aten._foreach_sign.default),
    aten.sqrt.default: _Family(aten._foreach_sqrt.default),
    aten.maximum.default: _Family(aten._foreach_maximum.List),
    aten.minimum.default: _Family(aten._foreach_minimum.List),
    aten.lerp.Tensor: _Family(aten._foreach_lerp.List),
    aten.add.Tensor: _Family(aten._foreach_add.List, aten._foreach_add.Scalar, aten._foreach_add.ScalarList),
    aten.sub.Tensor: _Family(aten._foreach_sub.List, aten._foreach_sub.Scalar, aten._foreach_sub.ScalarList),
    aten.mul.Tensor: _Family(aten._foreach_mul.List, aten._foreach_mul.Scalar, aten._foreach_mul.ScalarList),
    aten.div.Tensor: _Family(aten._foreach_div.List, aten._foreach_div.Scalar, aten._foreach_div.ScalarList),
    aten.pow.Tensor_Scalar: _Family(None, aten._foreach_pow.Scalar, aten._foreach_pow.ScalarList),
    aten.lerp.Scalar: _Family(None, aten._foreach_lerp.Scalar, aten._foreach_lerp.ScalarList),
    aten.addcmul.default: _Family(
        None, aten._foreach_addcmul.Scalar, aten._foreach_addcmul.ScalarList, option="value"
    ),
    aten.addcdiv.default: _Family(
        None, aten._foreach_addcdiv.Scalar, aten._foreach_addcdiv.ScalarList, option="value"
    ),
}


def model_update(program: Program) -> Program:
    """Write ops that the updates of several parameters have in common as one op on lists of tensors.

    All updates then run after the last gradient, level by level: first what depends on state and gradients, then what
    depends on that.
    """
    nodes = update_nodes(program.graph)
    groups = [group for group in _groups(nodes) if len(group) > 1]
    if not groups:
        return program
    late = set(nodes)
    level = _levels(nodes)
    member = {node: group for group in groups for node in group}
    early = [node for node in program.graph.nodes if node not in late and node.op != "output"]
    ordered = sorted(nodes, key=level.__getitem__)
    ordered = [node for node in ordered if member.get(node, [node])[0] is node]
    return _Writer(member).written(program, [*early, *ordered, program.graph.output_node()])


def _levels(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many ops of the update stand before each; those of one level do not need each other."""
    level: dict[fx.Node, int] = {}
    for node in nodes:
        level[node] = max((level[item] + 1 for item in node.all_input_nodes if item in level), default=0)
    return level


def _groups(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Ops of one level that are the same op on tensors of one dtype and device."""
    level = _levels(nodes)
    found: dict[Key, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if (family := _FAMILIES.get(node.target)) is not None and (key := _key(node, family)) is not None:
            found[level[node], *key].append(node)
    return list(found.values())


def _key(node: fx.Node, family: _Family) -> Key | None:
    """What the members of a group have in common; None for a node that fits in none."""
    described = value(node)
    tensors: list[Any] = [item for item in node.args if _is_tensor(item)]
    numbers = [item for item in node.args if not _is_tensor(item)]
    if not isinstance(described, TensorMeta) or not tensors or node.args[: len(tensors)] != tuple(tensors):
        return None
    forms = {(item.dtype, item.shape) for item in metas([value(item) for item in tensors])}
    if forms != {(described.dtype, described.shape)}:
        return None
    options = {name: _typed(item) for name, item in node.kwargs.items() if name != family.option}
    if len(numbers) > 1 or (numbers and (family.number is None or family.option or options)):
        return None
    if not numbers and not family.option and family.tensors is None:
        return None
    kind = type(numbers[0]).__name__ if numbers else ""
    return (
        node.target,
        len(tensors),
        kind if kind != "Node" else "float",
        described.dtype,
        described.device,
        tuple(options.items()),
    )


def _is_tensor(item: Any) -> bool:
    return isinstance(item, fx.Node) and isinstance(value(item), TensorMeta)


def _typed(item: Any) -> Any:
    return item if isinstance(item, fx.Node) else (type(item), repr(item))


class _Writer:
    """Writes the graph with groups in the place of their first members."""

    def __init__(self, member: dict[fx.Node, list[fx.Node]]) -> None:
        self._member = member
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}

    def written(self, program: Program, nodes: Sequence[fx.Node]) -> Program:
        """The program with `nodes` in this order; of a group they hold the first member only."""
        for node in nodes:
            if (group := self._member.get(node)) is not None:
                self._write(group)
            else:
                self._made[node] = self._graph.node_copy(node, self._made.__getitem__)
        return program.with_graph(self._graph)

    def _write(self, group: list[fx.Node]) -> None:
        target, arguments, options = _call(group)
        arguments, options = fx.map_arg((arguments, options), self._made.__getitem__)
        call = self._graph.call_function(target, arguments, options)
        set_value(call, tuple(value(node) for node in group))
        set_origin(call, origin(group[0]))
        for index, node in enumerate(group):
            self._made[node] = item = self._graph.create_node(
                "call_function", getitem, (call, index), {}, name=node.name
            )
            item.meta = dict(node.meta)


def _call(group: list[fx.Node]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op on lists for a group, with its arguments."""
    first, family = group[0], _FAMILIES[group[0].target]
    num_tensors = sum(map(_is_tensor, first.args))
    lists = tuple([node.args[position] for node in group] for position in range(num_tensors))
    options = {name: item for name, item in first.kwargs.items() if name != family.option}
    if family.option:
        numbers = [node.kwargs.get(family.option, family.usual) for node in group]
    elif num_tensors < len(first.args):
        numbers = [node.args[-1] for node in group]
    else:
        return family.tensors, lists, options
    if len(set(map(_typed, numbers))) == 1:
        return family.number, (*lists, numbers[0]), options
    return family.numbers, (*lists, numbers), options
