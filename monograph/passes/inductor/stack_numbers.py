"""Numbers that the updates of all parameters compute alike, as one row of numbers.

`1 - beta ** step` of each parameter would otherwise be computed inside the loop of each update, again and again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.ir.meta import TensorMeta, come_from, set_value, value
from monograph.ir.program import Program

aten = torch.ops.aten
_ELEMENTWISE = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
    aten.sqrt.default, aten.reciprocal.default, aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar,
})  # fmt: skip
_GIVEN = ("placeholder", "get_attr")
_OTHER = (aten.full.default, aten.scalar_tensor.default, aten._to_copy.default, aten.clone.default)
Kind = tuple[Any, ...]


def stack_numbers(program: Program) -> Program:
    """Compute numbers of one form, one for each parameter's step counter, together."""
    families = _families(program.graph)
    if not families:
        return program
    graph, new, at = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, int]()
    for number, (_, chains) in enumerate(families):
        at |= {node: number for chain in chains for node in chain}

    written = set[int]()

    def copied(node: fx.Node) -> Any:
        if node in new:
            return new[node]
        if node in at:
            if at[node] not in written:
                written.add(at[node])
                _emit(graph, *families[at[node]], new, copied)
            return new.get(node)  # None inside a row: nothing else reads it
        new[node] = made = graph.node_copy(node, copied)
        return made

    for node in program.graph.nodes:
        copied(node)
    return program.with_graph(graph)


def _families(graph: fx.Graph) -> list[tuple[list[fx.Node], list[list[fx.Node]]]]:
    """Groups of counters from which numbers of the same forms are made, with those numbers, in the same order."""
    early: set[fx.Node] = set()  # depends on numbers among the inputs and constants only
    sources: dict[fx.Node, set[fx.Node]] = {}  # number -> the counters that it depends on
    form: dict[fx.Node, int] = {}  # equal for numbers made in the same way
    known: dict[Kind, int] = {}
    chains: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        described = value(node) if node.op != "output" else None
        if not isinstance(described, TensorMeta) or described.shape:
            continue
        inputs = node.all_input_nodes
        simple = node.target in _ELEMENTWISE or node.target in _OTHER
        if node.op in _GIVEN or (simple and all(item in early for item in inputs)):
            early.add(node)
        if node in early and node.op == "call_function":
            form[node] = known.setdefault(
                (node.target, _forms(node.args, form), repr(node.kwargs)), len(known)
            )
        if node not in early or node.op in _GIVEN:
            continue
        counters = {counter for item in inputs for counter in sources.get(item, ())}
        sources[node] = counters
        if described.dtype is not torch.float64:
            continue
        if node.target is aten._to_copy.default and not (counters and _is_double(inputs[0])):
            counter = node  # what follows depends on this number, however it was made
            like = value(inputs[0])
            assert isinstance(like, TensorMeta)
            kind = ("counter", described.device, repr(node.kwargs), like.dtype)
            form[node] = known.setdefault(kind, len(known))
        elif len(counters) == 1 and node.target in _ELEMENTWISE and all(_is_double(item) for item in inputs):
            (counter,) = counters
        else:
            continue
        sources[node] = {counter}
        chains[counter].append(node)
    groups: dict[Kind, list[fx.Node]] = defaultdict(list)
    for counter, chain in chains.items():
        if len(chain) > 1:
            groups[tuple(form[node] for node in chain)].append(counter)
    return [
        (counters, [chains[item] for item in counters]) for counters in groups.values() if len(counters) > 1
    ]


def _forms(args: tuple[Any, ...], form: dict[fx.Node, int]) -> Kind:
    return tuple(form.get(item, item) if isinstance(item, fx.Node) else repr(item) for item in args)


def _is_double(node: fx.Node) -> bool:
    described = value(node)
    return isinstance(described, TensorMeta) and described.dtype is torch.float64


def _emit(
    graph: fx.Graph,
    counters: list[fx.Node],
    chains: list[list[fx.Node]],
    new: dict[fx.Node, fx.Node],
    copied: Any,
) -> None:
    """Write the first chain on a row of all counters, and take each number out of it."""
    row: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(chains[0]):
        target: Any = node.target
        if place == 0:
            counted = [copied(item.args[0]) for item in counters]
            base = _noted(graph.call_function(aten.stack.default, (counted,)), node.args[0], len(counters))
            come_from(base, node)  # a counter itself may be an input
            made = graph.call_function(target, (base, *node.args[1:]), dict(node.kwargs))
        else:
            args = fx.map_arg(node.args, lambda item: row[item] if item in row else copied(item))
            made = graph.call_function(target, args, dict(node.kwargs))
        row[node] = _noted(made, node, len(counters))
        for index, chain in enumerate(chains):
            if any(user not in chain for user in chain[place].users):
                picked = graph.call_function(aten.select.int, (made, 0, index))
                picked.meta = dict(chain[place].meta)
                new[chain[place]] = picked


def _noted(made: fx.Node, like: Any, length: int) -> fx.Node:
    made.meta = dict(like.meta)
    described = value(like)
    assert isinstance(described, TensorMeta)
    set_value(made, replace(described, shape=(length,), stride=(1,)))
    return made
