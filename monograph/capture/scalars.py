"""Branches that Python took on numbers that may move, turned into conditions checked before each step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from monograph._torch import is_random, is_symbolic, symbol_name
from monograph.capture.guards import Condition, condition
from monograph.errors import DataDependentError
from monograph.ir.meta import origin
from monograph.ir.port import Role

_READABLE = (Role.OPTIM, Role.HYPER, Role.CAPTURED)  # foreach optimizers count with a tensor that holds 1.0
_POWER_BELOW_ONE = re.compile(r"^(\w+) \*\* (\w+) <= 1\.0+$")


def read_outs(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that read a number out of a tensor, in order."""
    scalar = torch.ops.aten._local_scalar_dense.default
    return [node for node in graph.nodes if node.target is scalar]


def symbols_read_out(graph: fx.Graph) -> list[str]:
    """The symbols of those numbers."""
    values = [node.meta["val"] for node in read_outs(graph)]
    return [symbol_name(value) if is_symbolic(value) else "" for value in values]


def scalar_conditions(
    branches: Iterable[tuple[str, tuple[str, ...]]],
    backed: Mapping[str, int],
    unbacked: Mapping[str, fx.Node],
    roles: Sequence[Role],
    paths: Sequence[str],
) -> list[Condition]:
    """Conditions over the program's inputs, for every branch (text, symbols) that was recorded.

    `backed` maps a symbol to its input position, `unbacked` to the node of the program that reads it out;
    `roles` and `paths` are those of the inputs.
    """
    found: dict[str, Condition] = {}
    for text, names in branches:
        match = _POWER_BELOW_ONE.match(text)
        if match and match[1] in backed and match[2] in unbacked:
            # torch asks this for the square root of a bias correction; a step counter is never negative
            text, names = f"0.0 <= {match[1]} <= 1.0", (match[1],)
        if text not in found:
            about = _with_paths(text, names, backed, unbacked, paths)
            found[text] = condition(text, names, _reader(names, backed, unbacked, roles), about=about)
    return list(found.values())


def _with_paths(
    text: str,
    names: Sequence[str],
    backed: Mapping[str, int],
    unbacked: Mapping[str, fx.Node],
    paths: Sequence[str],
) -> str:
    """The text of a branch with paths in place of the symbols that torch made up."""
    known_as = {
        name: paths[backed[name]] if name in backed else _sources(unbacked[name], paths) for name in names
    }
    named = re.sub(r"\w+", lambda word: known_as.get(word[0], word[0]), text)
    return re.sub(r"\.0{9,}\b", ".0", named)  # torch writes 2.0 with sixteen digits


def _sources(number: fx.Node, paths: Sequence[str]) -> str:
    """What a number is read out of: the path of an input, or the inputs that its tensor is computed from."""
    inputs = [node for node in number.graph.nodes if node.op == "placeholder"]
    needed = _needed([number])
    found = [path for node, path in zip(inputs, paths, strict=True) if node in needed]
    return found[0] if number.args[0] in inputs else f"({', '.join(found)} as updated)"


def _reader(
    names: Sequence[str], backed: Mapping[str, int], unbacked: Mapping[str, fx.Node], roles: Sequence[Role]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if all(name in backed for name in names):
        positions = [backed[name] for name in names]
        return lambda inputs: [inputs[position] for position in positions]
    nodes = [unbacked.get(name) for name in names]
    slice_of = _slice([node for node in nodes if node is not None], roles)

    def read(inputs: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad():
            made = iter(slice_of(*inputs))
        return [inputs[backed[name]] if name in backed else next(made) for name in names]

    return read


def _slice(nodes: Sequence[fx.Node], roles: Sequence[Role]) -> fx.GraphModule:
    """The part of the program that computes `nodes`, which may stand on inputs that are known before the step."""
    needed = _needed(nodes)
    graph, copies = fx.Graph(), {}
    inputs = [node for node in nodes[0].graph.nodes if node.op == "placeholder"]
    for node, role in zip(inputs, roles, strict=True):
        if node in needed and role not in _READABLE:
            raise DataDependentError(
                "the step branches in Python on the value of a tensor",
                where=origin(nodes[0]),
                hint="use torch.where or torch.cond, or move the test out of build()",
            )
        copies[node] = graph.placeholder(node.name)
    for node in nodes[0].graph.nodes:
        if node in needed and node not in copies:
            if is_random(node.target):
                raise DataDependentError("the step branches in Python on a random number", where=origin(node))
            copies[node] = graph.node_copy(node, lambda item: copies[item])
    graph.output(tuple(copies[node] for node in nodes))
    return fx.GraphModule(nodes[0].graph.owning_module, graph)


def _needed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they stand on."""
    needed: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed
