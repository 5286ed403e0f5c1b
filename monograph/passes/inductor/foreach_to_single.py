"""Ops on lists of tensors, one by one: compilers fuse single ops, and know few of those on lists."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import OpOverload, overload_name, packet_name
from monograph.ir.meta import TensorMeta, set_value, value
from monograph.ir.program import Program

aten = torch.ops.aten
_PREFIX = "aten::_foreach_"
_OTHER_NAMES = {"norm": aten.linalg_vector_norm, "powsum": None, "max": aten.max, "copy": None, "zero": None}


def foreach_to_single(program: Program) -> Program:
    """Write `_foreach_add([a, b], [c, d])` as `add(a, c)` and `add(b, d)`; ops with no single form stay."""
    if not any(_single_op(node) is not None for node in program.graph.nodes):
        return program
    graph, new, single = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, list[fx.Node]]()
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem and node.args[0] in single:
            new[node] = single[node.args[0]][node.args[1]]
        elif (packet := _single_op(node)) is not None:
            single[node] = _one_by_one(graph, node, packet, new)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    return program.with_graph(graph)


def single_on_cpus(program: Program) -> Program:
    """The same where all that a program is given is on CPUs: there ops on lists are loops over single ops."""
    inputs = map(value, program.graph.find_nodes(op="placeholder"))
    on_cpus = all(item.device.type == "cpu" for item in inputs if isinstance(item, TensorMeta))
    return foreach_to_single(program) if on_cpus else program


def _single_op(node: fx.Node) -> Any:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    name = packet_name(node.target)
    if not name.startswith(_PREFIX) or any(not _is_one_of(node, user) for user in node.users):
        return None
    if any(isinstance(value(item), tuple) for item in node.all_input_nodes):
        return None  # a list that is not written out
    bare = name.removeprefix(_PREFIX)
    if overload_name(node.target) == "Tensor" and bare.startswith("addc"):
        return None  # a tensor of numbers, one for each
    return _OTHER_NAMES[bare] if bare in _OTHER_NAMES else getattr(aten, bare, None)


def _is_one_of(many: fx.Node, user: fx.Node) -> bool:
    return user.target is operator.getitem and type(user.args[1]) is int and user.args[0] is many


def _one_by_one(graph: fx.Graph, node: fx.Node, packet: Any, new: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    described = value(node)
    assert isinstance(described, tuple)
    overload = overload_name(node.target)
    made = []
    for index, like in enumerate(described):
        picked = [item[index] if isinstance(item, (list, tuple)) else item for item in node.args]
        arguments = list(fx.map_arg(picked, new.__getitem__))
        kwargs = dict(fx.map_arg(dict(node.kwargs), new.__getitem__))
        target, arguments, kwargs = _call(packet, overload, arguments, kwargs)
        single = graph.call_function(target, tuple(arguments), kwargs)
        single.meta = dict(node.meta)
        assert isinstance(like, TensorMeta)
        set_value(single, like)
        made.append(single)
    return made


def _call(
    packet: Any, overload: str, arguments: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """The single op, and its arguments: numbers that a list op takes by position are keywords of some."""
    name = packet.__name__
    if name in ("addcmul", "addcdiv"):
        if len(arguments) > 3:
            kwargs["value"] = arguments.pop()
        if "scalars" in kwargs:
            kwargs["value"] = kwargs.pop("scalars")
        return packet.default, arguments, kwargs
    if name == "lerp":
        return (packet.Tensor if overload == "List" else packet.Scalar), arguments, kwargs
    if name in ("add", "sub", "mul", "div"):
        return packet.Tensor, arguments, kwargs
    if name == "pow":
        scalar = packet.Tensor_Scalar if overload in ("Scalar", "ScalarList") else packet.Tensor_Tensor
        return (packet.Scalar if overload == "ScalarAndTensor" else scalar), arguments, kwargs
    if name in ("clamp_min", "clamp_max"):
        return (packet.Tensor if overload == "List" else packet.default), arguments, kwargs
    if name in ("maximum", "minimum") and overload != "List":
        clamp = aten.clamp_min if name == "maximum" else aten.clamp_max
        return clamp.default, arguments, kwargs
    if name == "linalg_vector_norm":
        dtype = arguments.pop() if len(arguments) > 2 else kwargs.pop("dtype", None)
        return packet.default, arguments, {"dtype": dtype}
    return packet.default, arguments, kwargs
