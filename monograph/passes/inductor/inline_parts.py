"""Calls of a program's subgraphs, inlined: a compiler sees one flat graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import fx, nn

from monograph.ir.program import Program


def inline_parts(program: Program) -> Program:
    """Put the nodes of each subgraph in the place of each of its calls."""
    return _inlined(program, [part.name for part in program.parts])


def inline_single_calls(program: Program) -> Program:
    """Put the nodes of each subgraph that is called once in the place of its call: what follows sees what it writes."""
    calls = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_module")
    return _inlined(program, [part.name for part in program.parts if calls[part.name] == 1])


def _inlined(program: Program, names: Collection[str]) -> Program:
    if not names:
        return program
    parts = {part.name: part for part in program.parts}
    kept = tuple(part for part in program.parts if part.name not in names)
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    root = nn.Module()
    for part in kept:
        root.add_module(part.name, part.module)

    def copied(node: fx.Node, known: dict[fx.Node, Any], module: fx.GraphModule, prefix: str) -> fx.Node:
        made = graph.node_copy(node, known.__getitem__)
        if node.op == "get_attr":
            made.target = f"{prefix}{node.target}"
            setattr(root, made.target, getattr(module, str(node.target)))
        return made

    for number, node in enumerate(program.graph.nodes):
        if node in new:  # a result of a part
            continue
        if node.op != "call_module" or node.target not in names:
            new[node] = copied(node, new, program.module, "")
            continue
        part = parts[str(node.target)]
        inputs = iter(fx.map_arg(node.args, new.__getitem__))
        inner: dict[fx.Node, Any] = {}
        for item in part.graph.nodes:
            if item.op == "placeholder":
                inner[item] = next(inputs)
            elif item.op == "output":
                results = fx.map_arg(item.args[0], inner.__getitem__)
            else:
                inner[item] = copied(item, inner, part.module, f"part{number}_")
        for user in node.users:
            new[user] = results[user.args[1]]
    return replace(program, module=fx.GraphModule(root, graph), parts=kept)
