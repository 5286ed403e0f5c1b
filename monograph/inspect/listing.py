"""The ops of one module as Python: a function of what they read from outside."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx

from monograph.compat.ops import named_input
from monograph.inspect.suggestions import no_ops_in
from monograph.ir.meta import computes, origin, value
from monograph.ir.port import Port
from monograph.ir.printer import HEADER, branch_code, comment, function_code, note
from monograph.ir.program import Program
from monograph.ir.text import Text


def module_text(program: Program, module: str) -> Text:
    """The ops of a module and of those inside of it, in all phases. Raises DefinitionError if there are none."""
    parts = [lines for part in program.programs if (lines := list(_lines(part, module)))]
    if not (module and parts):
        raise no_ops_in(module, {origin(node).module for node in program.ops()})
    return Text("\n".join([HEADER, *("\n".join(lines) + "\n" for lines in parts)]))


def _lines(program: Program, module: str) -> Iterator[str]:
    """The function of the ops that one program has of the module; nothing if it has none."""
    inside = [node for node in program.graph.nodes if computes(node) and origin(node).is_in(module)]
    if not inside:
        return
    members = set(inside)
    read = {item for node in inside for item in node.all_input_nodes} - members
    outside = [node for node in program.graph.nodes if node in read]
    branches = [node for node in outside if node.op == "get_attr"]
    values = [node for node in outside if node.op != "get_attr"]
    given = [node for node in inside if not members.issuperset(node.users)]

    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in values:
        new[node] = named_input(graph, node.name)
    for node in (*branches, *inside):
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in given))
    lines = function_code(re.sub(r"\W", "_", module), graph, notes=True)
    ports = dict(zip(program.graph.find_nodes(op="placeholder"), program.inputs, strict=True))
    for number, node in enumerate(values, 1):
        lines[number] += comment(_about(node, ports.get(node)))
    yield from branch_code(fx.GraphModule(program.module, graph)) if branches else ()
    yield from lines


def _about(node: fx.Node, port: Port | None) -> str:
    return note(node) if port is None else f"{port.role:<8} {port.path}  {value(node) or ''}"
