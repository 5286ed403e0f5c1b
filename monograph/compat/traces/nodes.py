"""Nodes of graphs, and what stands for them in a trace: `torch.fx` and the tracker of make_fx."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import fx

from monograph.compat.fakes import has_symbols, is_fake


def traced_node(tensor: object, tracer: Any) -> fx.Node | None:
    """The node of an unfinished trace that made a tensor, None for a tensor that the trace does not know."""
    get_slot: Any = torch.fx.experimental.proxy_tensor.get_proxy_slot
    slot = get_slot(tensor, tracer, None) if isinstance(tensor, torch.Tensor) else None
    node: fx.Node | None = None if slot is None else slot.proxy.node
    return node


def last_node(graph: fx.Graph) -> fx.Node:
    """The last node of a graph that has some."""
    found: fx.Node = next(
        iter(reversed(graph.nodes))
    )  # torch 2.11 gives a list there, later ones an iterator
    return found


def let_stand_for(node: fx.Node, tensor: torch.Tensor, tracer: Any) -> None:
    """What: the place of a fake in a trace. Why: nodes that are copied have written it. Degraded path: none."""
    proxies: Any = torch.fx.experimental.proxy_tensor
    proxies.set_proxy_slot(tensor, tracer, proxies._ProxyTensor(fx.Proxy(node, tracer), None))


def add_inputs(items: Sequence[Any], tracer: Any) -> None:
    """Let an unfinished trace, which has nothing yet, take tensors and numbers as its inputs.

    What: what make_fx does with its arguments. Why: it looks into each through a dozen functions, which for the
    hundreds that a step has is a twelfth of its capture. Degraded path: none, as it uses what make_fx itself uses.
    """
    proxies: Any = torch.fx.experimental.proxy_tensor
    nodes = [new_input(tracer.graph, index) for index in range(len(items))]
    with proxies.disable_proxy_modes_tracing():
        for item, node in zip(items, nodes, strict=True):
            if is_fake(item) and item.layout is torch.strided and not has_symbols(item):
                let_stand_for(node, item, tracer)
                node.meta["val"] = proxies.snapshot_fake(item, include_real=True)
            else:
                proxies.track_tensor_tree(item, fx.Proxy(node, tracer), constant=None, tracer=tracer)


def new_node(graph: fx.Graph, target: Any, args: Any, kwargs: Any = MappingProxyType({})) -> fx.Node:
    """A call of an op at the end of a graph, which may be an unfinished trace, named as make_fx names it.

    What: how a graph spells the name of an op. Why: programs have the same names in whichever way they are made.
    Degraded path: none needed, unchanged since 2.0.
    """
    return _append(graph, "call_function", target, args, dict(kwargs), _spelled(target))


def new_input(graph: fx.Graph, index: int) -> fx.Node:
    """The placeholder of the input at this position, named as make_fx names it."""
    name = f"arg{index}_1"
    return _append(graph, "placeholder", name, (), {}, name)


def _append(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    """What: what `Graph.create_node` does, but for a look into every argument that no program has. Why: most nodes are
    made here. Degraded path: `create_node`.
    """
    private: Any = graph
    try:
        names, listed = private._graph_namespace, private._find_nodes_lookup_table
        create_name, by_node, insert = names.create_name, names._obj_to_name, private._insert
        _ = private._len
    except AttributeError:
        return graph.create_node(op, target, args, kwargs, name=name)
    name = create_name(name, None)
    new = fx.Node(graph, name, op, target, args, kwargs)
    by_node[new] = name
    insert(new)
    listed.insert(new)
    private._len += 1
    return new


_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def record_directly(tracer: Any) -> None:
    """Let a trace take the arguments of an op, and make its node, without what else a tracer can be asked for.

    What: `create_arg` and `create_node` of make_fx's tracer. Why: they look for modules, scopes, annotations and stacks,
    which is a tenth of a trace. Degraded path: theirs, for all that is not plain.
    """
    take, create, graph = tracer.create_arg, tracer.create_node, tracer.graph

    def create_arg(item: Any) -> Any:
        kind = type(item)
        if kind in _PLAIN:
            return item
        if kind is fx.Proxy:
            return item.node
        if kind is tuple or kind is list:
            return kind(map(tracer.create_arg, item))
        return {} if kind is dict and not item else take(item)

    def create_node(
        kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        if kind != "call_function" or type_expr is not None:
            made: fx.Node = create(kind, target, args, kwargs, name, type_expr)
            return made
        return _append(graph, kind, target, args, kwargs, name or graph._target_to_str(target))

    tracer.create_arg, tracer.create_node = create_arg, create_node


@cache
def _spelled(target: Any) -> str:
    """How a graph names what an op makes."""
    packet = getattr(target, "overloadpacket", None)
    return fx.Graph()._target_to_str(target if packet is None else packet.__name__)


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """What: a GraphModule whose Python code is written when it is first called. Why: the passes make many that nothing
    calls, and the code of one takes as long as the pass. Degraded path: `fx.GraphModule`.
    """
    try:
        kind: Any = importlib.import_module("torch.fx._lazy_graph_module")._LazyGraphModule
    except (ImportError, AttributeError):
        kind = fx.GraphModule
    module: fx.GraphModule = kind(root, graph)
    return module


def copied_graph(nodes: Sequence[fx.Node], instead: Mapping[fx.Node, Any]) -> fx.Graph:
    """A graph of copies. What reads a key of `instead` reads the copy of its value, or the number that it is.

    What: what `Graph.node_copy` does, but for a look into every argument that no program has, and for new names, since
    those of one graph differ already. Why: each pass copies, and that takes a fourth of the time.
    Degraded path: `node_copy`.
    """
    graph = fx.Graph()
    try:
        copied = _copier(graph, nodes)
    except AttributeError:
        graph = fx.Graph()
        copied = graph.node_copy
    made: dict[fx.Node, Any] = {}
    for node in nodes:
        if node in instead:
            other = instead[node]
            made[node] = made[other] if isinstance(other, fx.Node) else other
        else:
            made[node] = copied(node, made.__getitem__)
    return graph


def _copier(graph: Any, nodes: Sequence[fx.Node]) -> Callable[[fx.Node, Callable[[fx.Node], Any]], fx.Node]:
    """`node_copy` of an empty graph, for nodes whose names are taken already."""
    names, listed, insert = graph._graph_namespace, graph._find_nodes_lookup_table.insert, graph._insert
    by_node, length = names._obj_to_name, graph._len
    names._used_names.update(node.name for node in nodes)
    if nodes:
        names._base_count.update(cast(Any, nodes[0].graph)._graph_namespace._base_count)

    def copied(node: fx.Node, of: Callable[[fx.Node], Any]) -> fx.Node:
        nonlocal length
        args, kwargs = fx.map_arg(node.args, of), fx.map_arg(node.kwargs, of) if node.kwargs else {}
        new = fx.Node(graph, node.name, node.op, node.target, args, kwargs, node.type)
        new.meta.update(node.meta)
        insert(new)
        listed(new)
        by_node[new] = node.name
        length += 1
        graph._len = length
        return new

    return copied
